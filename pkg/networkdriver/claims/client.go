// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/retry"
)

// ClaimGetter reads one claim.
type ClaimGetter interface {
	GetClaim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
}

// Classes reads device classes.
type Classes interface {
	GetClass(ctx context.Context, name string) (*resourceapi.DeviceClass, error)
}

// NewClasses returns the reader of a real API server.
func NewClasses(classes resourceclient.DeviceClassesGetter) Classes { return classReader{classes} }

type classReader struct {
	classes resourceclient.DeviceClassesGetter
}

func (r classReader) GetClass(ctx context.Context, name string) (*resourceapi.DeviceClass, error) {
	class, err := r.classes.DeviceClasses().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get device class %s: %w", name, err)
	}
	return class, nil
}

// ClaimClient is what the [Writer] needs of the API server.
type ClaimClient interface {
	ClaimGetter
	// ApplyClaimStatus makes the entries of the configuration the owner's only ones in the claim's status, and leaves
	// all others alone. The claim must have the configuration's UID; if there is nothing to take out of the status of
	// a claim, it is not written.
	ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, owner Owner) error
}

// NewClaimClient returns the client for a real API server.
func NewClaimClient(claims resourceclient.ResourceClaimsGetter) ClaimClient { return client{claims} }

type client struct {
	claims resourceclient.ResourceClaimsGetter
}

func (c client) GetClaim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	claim, err := c.claims.ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get claim %s/%s: %w", namespace, name, err)
	}
	return claim, nil
}

func (c client) ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, owner Owner) error {
	wanted, err := configured(config)
	if err != nil {
		return err
	}
	applied := false
	if len(wanted) > 0 {
		applied, err = c.apply(ctx, config, wanted, owner)
	}
	if err == nil && !applied {
		err = c.replaceEntries(ctx, config, wanted, owner)
	}
	if err != nil {
		return fmt.Errorf("apply status of claim %s/%s: %w", *config.Namespace, *config.Name, err)
	}
	return nil
}

// apply says whether server-side apply made the owner's entries what they shall be. It cannot write every claim, see
// refusesAllocation, and it leaves what another field manager has written as well: the agent of a version whose field
// manager was the driver's name, or replaceEntries.
func (c client) apply(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration,
	wanted []resourceapi.AllocatedDeviceStatus, owner Owner) (bool, error) {
	claim, err := c.claims.ResourceClaims(*config.Namespace).ApplyStatus(ctx, config,
		metav1.ApplyOptions{FieldManager: owner.fieldManager(), Force: true})
	if refusesAllocation(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	have, _ := statusesIn(claim.Status.Devices, owner)
	want, _ := statusesIn(wanted, owner)
	return equalStatuses(have, want), nil
}

// configured returns the configuration's entries as they are read from a claim.
func configured(config *resourceapply.ResourceClaimApplyConfiguration) ([]resourceapi.AllocatedDeviceStatus, error) {
	raw, err := json.Marshal(config.Status)
	if err != nil {
		return nil, fmt.Errorf("encode the entries: %w", err)
	}
	var status resourceapi.ResourceClaimStatus
	if err := json.Unmarshal(raw, &status); err != nil {
		return nil, fmt.Errorf("decode the entries: %w", err)
	}
	return status.Devices, nil
}

// refusesAllocation recognises a claim that server-side apply cannot write at all. The server takes the claim apart and
// puts it together again, which orders the keys of opaque parameters and drops their blanks, and then refuses the
// change of bytes in an allocation that nobody asked to change. Parameters are stored as their author wrote them, so
// that such claims are common.
func refusesAllocation(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool {
		return c.Field == "status.allocation" || strings.HasPrefix(c.Field, "status.allocation.")
	})
}

// replaceEntries takes the owner's entries out of the claim as it is read, puts in the wanted ones, and writes the claim
// if nobody has written it meanwhile. That works whatever way the entries came, but needs the bytes of the parameters
// unchanged, which only a client that speaks protobuf gets and gives.
func (c client) replaceEntries(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration,
	wanted []resourceapi.AllocatedDeviceStatus, owner Owner) error {
	claims := c.claims.ResourceClaims(*config.Namespace)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		claim, err := claims.Get(ctx, *config.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if claim.UID != *config.UID {
			return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), *config.Name)
		}
		if len(wanted) == 0 && !slices.ContainsFunc(claim.Status.Devices, owner.owns) {
			return nil // it may be another node's by now, and this one has no right to write it
		}
		claim.Status.Devices = append(slices.DeleteFunc(claim.Status.Devices, owner.owns), wanted...)
		_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{FieldManager: owner.fieldManager()})
		return err
	})
}
