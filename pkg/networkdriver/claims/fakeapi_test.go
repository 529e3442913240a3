// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
)

var claimsResource = schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}

// fakeAPI is an API server that holds claims and counts what is written to them.
type fakeAPI struct {
	mu     sync.Mutex // guards the fields below
	claims map[string]*resourceapi.ResourceClaim
	writes int
	reads  int
	fail   func(call, name string) error
	block  chan struct{}
}

func newFakeAPI(claims ...*resourceapi.ResourceClaim) *fakeAPI {
	a := &fakeAPI{claims: map[string]*resourceapi.ResourceClaim{}}
	for _, c := range claims {
		a.claims[c.Namespace+"/"+c.Name] = c
	}
	return a
}

func (a *fakeAPI) GetClaim(_ context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reads++
	if a.fail != nil {
		if err := a.fail("get", name); err != nil {
			return nil, err
		}
	}
	claim := a.claims[namespace+"/"+name]
	if claim == nil {
		return nil, apierrors.NewNotFound(claimsResource, name)
	}
	return claim.DeepCopy(), nil
}

func (a *fakeAPI) ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, owner Owner) error {
	a.mu.Lock()
	block := a.block
	a.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.writes++
	if a.fail != nil {
		if err := a.fail("apply", *config.Name); err != nil {
			return err
		}
	}
	claim := a.claims[*config.Namespace+"/"+*config.Name]
	switch {
	case owner.Driver != testDriver:
		return fmt.Errorf("driver %q", owner.Driver)
	case claim == nil:
		return apierrors.NewNotFound(claimsResource, *config.Name)
	case claim.UID != *config.UID:
		return apierrors.NewConflict(claimsResource, *config.Name, errors.New("uid mismatch"))
	}
	entries, err := configured(config)
	if err != nil {
		return err
	}
	claim.Status.Devices = append(slices.DeleteFunc(claim.Status.Devices, owner.owns), entries...)
	return nil
}

func (a *fakeAPI) setFail(fail func(call, name string) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fail = fail
}

func (a *fakeAPI) counts() (reads, writes int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reads, a.writes
}

func (a *fakeAPI) devices(claim string) []resourceapi.AllocatedDeviceStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.claims["default/"+claim].DeepCopy().Status.Devices
}
