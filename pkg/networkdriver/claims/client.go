// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
)

// ClaimGetter reads one claim.
type ClaimGetter interface {
	GetClaim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
}

// ClaimClient is what the [Writer] needs of the API server.
type ClaimClient interface {
	ClaimGetter
	// ApplyClaimStatus applies the configuration to the claim's status by server-side apply, and takes the fields
	// from whoever else has them.
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
	_, err := c.claims.ResourceClaims(*config.Namespace).ApplyStatus(ctx, config,
		metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if err != nil {
		return fmt.Errorf("apply status of claim %s/%s: %w", *config.Namespace, *config.Name, err)
	}
	return nil
}
