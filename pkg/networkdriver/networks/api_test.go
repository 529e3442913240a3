// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/test/lab"
)

// TestAPIReuse has two nodes pass a pod's addresses on by the real API server, which decides who gets them.
func TestAPIReuse(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(t, err)
	installer, err := apiextensionsclient.NewForConfig(config)
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer))
	clientset, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	objects, err := NewClient(config, clientset.CoreV1())
	require.NoError(t, err)

	one, two := newNode(objects, "node1"), newNode(objects, "node2")
	subnets := []types.Subnet{subnet(t, "192.0.2.0/24", ""), subnet(t, "2001:db8::/64", "")}
	first, err := one.Take(t.Context(), podRow("db-0", "first", subnets...), one.note)
	require.NoError(t, err)
	require.NoError(t, one.Holds(t.Context(), first))
	_, err = two.Take(AtOnce(t.Context()), podRow("db-0", "second", subnets...), two.note)
	require.ErrorIs(t, err, errHeld)
	one.release(t, first)
	require.Error(t, one.Holds(t.Context(), first))

	// Several take it over at once, and one gets it.
	var wg sync.WaitGroup
	var mu sync.Mutex
	var second *tables.DRAAllocation
	for _, claim := range []string{"a", "b", "c", "d"} {
		wg.Go(func() {
			row, err := two.Take(AtOnce(t.Context()), podRow("db-0", claim, subnets...), two.note)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				assert.Nil(t, second, "twice")
				second = row
			}
		})
	}
	wg.Wait()
	if second != nil { // else each has had one of the two
		require.Equal(t, first.Config.Joined.Addresses, second.Config.Joined.Addresses)
		require.NoError(t, two.Holds(t.Context(), second))
	}
	clear(two.journal)
	require.NoError(t, two.compare(t.Context()))
	left, err := objects.OfNode(t.Context(), "node2")
	require.NoError(t, err)
	for _, object := range left {
		require.Equal(t, v2alpha1.AddressReleased, object.Spec.State)
	}
	third, err := one.Take(t.Context(), podRow("db-0", "third", subnets...), one.note)
	require.NoError(t, err)
	require.Equal(t, first.Config.Joined.Addresses, third.Config.Joined.Addresses)

	// Not by what was read before, and not what is in use.
	stale, err := objects.Get(t.Context(), v2alpha1.AddressName("storage", third.Config.Joined.Addresses[0].Addr()))
	require.NoError(t, err)
	one.release(t, third)
	require.True(t, apierrors.IsConflict(one.give(t.Context(), stale)))
	fourth, err := two.Take(t.Context(), podRow("db-0", "fourth", subnets...), two.note)
	require.NoError(t, err)
	one.Return(t.Context(), third)
	require.NoError(t, two.Holds(t.Context(), fourth))

	// One that nothing is kept of goes.
	plain, err := one.Take(t.Context(), rowFor("plain", subnets...), one.note)
	require.NoError(t, err)
	addr := plain.Config.Joined.Addresses[0].Addr()
	require.Eventually(t, func() bool {
		found, err := objects.InBlock(t.Context(), "storage", v2alpha1.AddressBlock(addr), false)
		return assert.NoError(t, err) && slices.ContainsFunc(found, func(a v2alpha1.CiliumNetworkDriverAddress) bool { return a.Spec.Address == addr.String() })
	}, time.Minute, 10*time.Millisecond, "in the cache")
	other, err := objects.Get(t.Context(), v2alpha1.AddressName("storage", addr))
	require.NoError(t, err)
	other.ResourceVersion = stale.ResourceVersion
	require.True(t, apierrors.IsConflict(objects.Delete(t.Context(), other)))
	again, err := one.Take(t.Context(), rowFor("plain", subnets...), one.note)
	require.NoError(t, err)
	require.Equal(t, plain, again)
	anew, err := objects.Get(t.Context(), v2alpha1.AddressName("storage", addr))
	require.NoError(t, err)
	require.NotEqual(t, other.UID, anew.UID)
	one.Return(t.Context(), plain)
	_, err = objects.Get(t.Context(), v2alpha1.AddressName("storage", plain.Config.Joined.Addresses[0].Addr()))
	require.True(t, apierrors.IsNotFound(err), "%v", err)
}
