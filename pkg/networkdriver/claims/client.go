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

// ClaimClient is what the [Writer] needs of the API server.
type ClaimClient interface {
	ClaimGetter
	// ApplyClaimStatus makes the entries of the configuration the driver's only ones in the claim's status, and leaves
	// those of others alone. The field manager is the driver's name.
	ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, fieldManager string) error
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

func (c client) ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, fieldManager string) error {
	applied, err := c.claims.ResourceClaims(*config.Namespace).ApplyStatus(ctx, config,
		metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if refusesAllocation(err) || err == nil && len(entriesBy(applied, fieldManager)) != len(config.Status.Devices) {
		err = c.replaceEntries(ctx, config, fieldManager)
	}
	if err != nil {
		return fmt.Errorf("apply status of claim %s/%s: %w", *config.Namespace, *config.Name, err)
	}
	return nil
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

// replaceEntries is what is done for a claim that cannot be applied to: the claim is read, gets the driver's entries
// in the place of those it has, and is written if nobody has written it meanwhile. It needs the bytes of the parameters
// unchanged, which only a client that speaks protobuf gets and gives. Server-side apply does not remove entries that
// came this way, which is why it is followed up.
func (c client) replaceEntries(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, driver string) error {
	raw, err := json.Marshal(config.Status)
	if err != nil {
		return fmt.Errorf("encode the entries: %w", err)
	}
	var wanted resourceapi.ResourceClaimStatus
	if err := json.Unmarshal(raw, &wanted); err != nil {
		return fmt.Errorf("decode the entries: %w", err)
	}
	claims := c.claims.ResourceClaims(*config.Namespace)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		claim, err := claims.Get(ctx, *config.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if claim.UID != *config.UID {
			return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), *config.Name)
		}
		claim.Status.Devices = slices.DeleteFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool { return isBy(d, driver) })
		claim.Status.Devices = append(claim.Status.Devices, wanted.Devices...)
		_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{FieldManager: driver})
		return err
	})
}

// entriesBy returns the driver's own entries in the claim's status.
func entriesBy(claim *resourceapi.ResourceClaim, driver string) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for _, d := range claim.Status.Devices {
		if isBy(d, driver) {
			entries = append(entries, d)
		}
	}
	return entries
}

// isBy says whether an entry is the driver's; shares of a device are not what it writes.
func isBy(d resourceapi.AllocatedDeviceStatus, driver string) bool {
	return d.Driver == driver && d.ShareID == nil
}
