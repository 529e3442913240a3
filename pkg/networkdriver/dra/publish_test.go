// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var everything = []v2alpha1.CiliumNetworkDriverDevicePoolConfig{
	{PoolName: "fast", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{}},
}

func (f *fixture) publishing() {
	f.SetPools(everything)
	f.inventory.Publish(types.DeviceManagerTypeDummy, types.Snapshot{Devices: inventorytest.Devices(types.DeviceManagerTypeDummy, "dummy", 2)})
	f.start()
	f.kubelet(nil, accepted)
}

func (f *fixture) waitSlices(n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		list, err := f.client.Tracker().List(resourceapi.SchemeGroupVersion.WithResource("resourceslices"),
			resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "")
		require.NoError(f.t, err)
		return meta.LenList(list) == n
	}, patience, 10*time.Millisecond, "want %d slices; log:\n%s", n, f.log)
}

func healthy(s State) bool { return s.PublicationProblem == nil }

// refuse makes the apiserver refuse the verb on slices while the result is true.
func (f *fixture) refuse(verb string, err error) *atomic.Bool {
	var on atomic.Bool
	on.Store(true)
	refuse := func(clienttesting.Action) (bool, runtime.Object, error) { return on.Load(), nil, err }
	f.client.PrependReactor(verb, "resourceslices", refuse)
	if verb == "watch" {
		f.client.PrependWatchReactor("resourceslices", func(clienttesting.Action) (bool, watch.Interface, error) {
			return on.Load(), nil, err
		})
	}
	return &on
}

func TestPublicationProblems(t *testing.T) {
	slices := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceslices"}
	forbidden := func(verb string) error {
		return apierrors.NewForbidden(slices, "", fmt.Errorf("user cannot %s resource resourceslices", verb))
	}
	tests := []struct {
		verb, reason string
		err          error
	}{
		{"list", ReasonForbidden, forbidden("list")},
		{"watch", ReasonForbidden, forbidden("watch")},
		{"create", ReasonForbidden, forbidden("create")},
		{"create", ReasonInvalid, apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "x", nil)},
		{"create", ReasonFailed, errors.New("connection refused")},
	}
	for _, tt := range tests {
		t.Run(tt.verb+" "+tt.reason, func(t *testing.T) {
			f := newFixture(t, fakeClaims{}, nil)
			refused := f.refuse(tt.verb, tt.err)
			f.publishing()
			state := f.waitState("problem", func(s State) bool { return s.PublicationProblem != nil })
			assert.Equal(t, tt.reason, state.PublicationProblem.Reason)
			assert.Contains(t, state.PublicationProblem.Message, tt.err.Error())
			assert.True(t, state.Registered, "pods that have devices are served all the same")
			require.Eventually(t, func() bool {
				return testutil.ToFloat64(f.metrics.publications.WithLabelValues(tt.reason)) >= 3
			}, patience, 10*time.Millisecond, "it is tried again")
			assert.Equal(t, 1, f.log.Count("ResourceSlices cannot be published", "reason="+tt.reason), "and logged once: %s", f.log)

			refused.Store(false)
			f.waitState("recovery", healthy)
			f.waitSlices(1)
			require.Eventually(t, func() bool { return f.log.Count("Publication of ResourceSlices works again") == 1 }, patience, 10*time.Millisecond)
		})
	}
}

// A PF whose devices are away has its port all the same, until the pools are configured anew. Where its devices are there they say whose it is.
func TestPublicationPFs(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	pools := func() []v2alpha1.CiliumNetworkDriverDevicePoolConfig {
		filter := func(n int) *v2alpha1.CiliumNetworkDriverDeviceFilter {
			return &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{fmt.Sprintf("ens1f0v%d", n)}}
		}
		return []v2alpha1.CiliumNetworkDriverDevicePoolConfig{{PoolName: "a", Filter: filter(1)}, {PoolName: "b", Filter: filter(2)}}
	}
	vf := func(n int, pf string) types.Device {
		d := inventorytest.VF(n)
		d.PFName = pf
		return d
	}
	f.SetPools(pools())
	f.inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{Devices: []types.Device{vf(1, "eth0"), vf(2, "eth0")}})
	f.start()
	f.kubelet(nil, accepted)
	wait := func(pfs map[string][]string, devices int) {
		t.Helper()
		f.waitState("PFs", func(s State) bool {
			return s.Publication != nil && len(s.Publication.Pools) == devices && reflect.DeepEqual(s.Publication.PFs, pfs)
		})
	}
	wait(map[string][]string{"a": {"eth0"}, "b": {"eth0"}}, 2)
	f.inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{})
	wait(map[string][]string{"a": {"eth0"}, "b": {"eth0"}}, 0)
	f.inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{Devices: []types.Device{vf(2, "eth1")}})
	wait(map[string][]string{"a": {"eth0"}, "b": {"eth0", "eth1"}}, 1)
	f.inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{Devices: []types.Device{vf(1, "eth0"), vf(2, "eth1")}})
	wait(map[string][]string{"a": {"eth0"}, "b": {"eth1"}}, 2)
	f.inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{Devices: []types.Device{vf(2, "eth1")}})
	wait(map[string][]string{"a": {"eth0"}, "b": {"eth1"}}, 1)
	f.SetPools(pools())
	wait(map[string][]string{"b": {"eth1"}}, 1)
}

func TestDroppedFieldsStand(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	dropped := &resourceslice.DroppedFieldsError{PoolName: testNode + "/fast"}
	dropped.DesiredSlice, dropped.ActualSlice = &resourceapi.ResourceSlice{}, &resourceapi.ResourceSlice{}
	f.writer.handleError(context.Background(), dropped, "create ResourceSlice")
	f.writer.ended(testNode+"/fast", false)
	state, _ := f.State()
	require.NotNil(t, state.PublicationProblem)
	assert.Equal(t, ReasonFieldsDropped, state.PublicationProblem.Reason)
	f.writer.ended(testNode+"/other", false)
	state, _ = f.State()
	assert.NotNil(t, state.PublicationProblem, "another pool's success does not mend it")
}

// A publication that ends takes the driver with it, which publishes when it is started again.
func TestPublicationEnds(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	write := f.publisher.write
	published := make(chan struct{})
	f.publisher.write = func(ctx context.Context, resources *resourceslice.DriverResources) error {
		assert.NoError(t, write(ctx, resources))
		<-published
		return errors.New("controller is gone")
	}
	f.publishing()
	f.waitSlices(1)
	close(published)
	require.EqualError(t, <-f.done, "publish ResourceSlices: controller is gone")
	state, _ := f.State()
	assert.False(t, state.Registered)
	assert.Contains(t, state.PublicationProblem.Message, "controller is gone")

	slices := f.client.ResourceV1().ResourceSlices()
	list, err := slices.List(context.Background(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	require.NoError(t, slices.Delete(context.Background(), list.Items[0].Name, metav1.DeleteOptions{}))
	f.waitSlices(0)
	f.publisher.write = write
	f.start()
	f.kubelet(nil, accepted)
	f.waitSlices(1)
	f.waitState("recovery", healthy)
}

func TestDeletedSliceComesBack(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	f.publishing()
	for range 2 {
		f.waitSlices(1)
		list, err := f.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
		require.NoError(t, err)
		start := time.Now()
		require.NoError(t, f.client.ResourceV1().ResourceSlices().Delete(context.Background(), list.Items[0].Name, metav1.DeleteOptions{}))
		f.waitSlices(0)
		f.waitSlices(1)
		assert.Less(t, time.Since(start), 10*time.Second)
	}
}
