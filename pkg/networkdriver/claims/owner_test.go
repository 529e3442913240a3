// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const otherNode = "node-2"

func TestFieldManager(t *testing.T) {
	require.Equal(t, "networkdriver.cilium.io/node-1", Owner{testDriver, testNode}.fieldManager())

	longest := strings.Repeat("d", 63)
	names := map[string]bool{}
	for _, o := range []Owner{
		{longest, "n"}, {longest, strings.Repeat("n", 64)}, {longest, strings.Repeat("n", 65)}, {longest, strings.Repeat("n", 253)},
		{longest, strings.Repeat("n", 252) + "m"}, {"d", strings.Repeat("n", 253)}, {"d", "n"},
	} {
		name := o.fieldManager()
		require.Empty(t, validation.ValidateFieldManager(name, field.NewPath("manager")))
		require.True(t, strings.HasPrefix(name, o.Driver+"/"), "%s", name)
		require.False(t, names[name], "%s", name)
		names[name] = true
	}
}

func TestOwns(t *testing.T) {
	share := "x"
	for _, tt := range []struct {
		driver, pool string
		share        *string
		want         bool
	}{
		{testDriver, "node-1/pool", nil, true},
		{testDriver, "node-2/pool", nil, false},
		{testDriver, "node-10/pool", nil, false},
		{testDriver, "pool", nil, false},
		{testDriver, "node-1/", nil, false},
		{testDriver, "node-1/pool", &share, false},
		{otherDriver, "node-1/pool", nil, false},
	} {
		require.Equal(t, tt.want, Owner{testDriver, testNode}.owns(resourceapi.AllocatedDeviceStatus{
			Driver: tt.driver, Pool: tt.pool, Device: "a", ShareID: tt.share}), "%+v", tt)
	}
}

func TestOwners(t *testing.T) {
	testOwners(t, fake.NewClientset().ResourceV1(), "", `{"vlan":5}`)
}

// testOwners has several owners write entries into one claim's status. The names of the claims begin with prefix, and
// the parameters are as their author wrote them.
func testOwners(t *testing.T, getter resourceclient.ResourceClaimsGetter, prefix, parameters string) {
	claims := getter.ResourceClaims("default")
	get := func(t *testing.T, name string) *resourceapi.ResourceClaim {
		t.Helper()
		claim, err := claims.Get(t.Context(), name, metav1.GetOptions{})
		require.NoError(t, err)
		return claim
	}
	setStatus := func(t *testing.T, name string, status resourceapi.ResourceClaimStatus, manager string) {
		t.Helper()
		claim := get(t, name)
		claim.Status = status
		_, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{FieldManager: manager})
		require.NoError(t, err)
	}
	gpu := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: otherDriver, Pool: "node-1/gpus", Device: "gpu-0"}
	net := func(node string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: "net", Driver: testDriver, Pool: node + "/pool", Device: "a"}
	}
	// create makes a claim with an entry of another driver, and devices of ours on the nodes.
	create := func(t *testing.T, name string, nodes ...string) (Ref, resourceapi.ResourceClaimStatus) {
		t.Helper()
		claim := newClaim(prefix+name, withResult(gpu), fromClaim(parameters, "net"), func(c *resourceapi.ResourceClaim) {
			for _, request := range []string{"net", "gpu"} {
				c.Spec.Devices.Requests = append(c.Spec.Devices.Requests,
					resourceapi.DeviceRequest{Name: request, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "class"}})
			}
			c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: gpu.Driver, Pool: gpu.Pool, Device: gpu.Device}}
		})
		for _, node := range nodes {
			withResult(net(node))(claim)
		}
		status := *claim.Status.DeepCopy()
		claim.Status = resourceapi.ResourceClaimStatus{}
		created, err := claims.Create(t.Context(), claim, metav1.CreateOptions{})
		require.NoError(t, err)
		setStatus(t, claim.Name, status, otherDriver)
		return RefOf(created), status
	}
	entries := func(t *testing.T, claim Ref) []string {
		t.Helper()
		have := map[string]bool{}
		for _, d := range get(t, claim.Name).Status.Devices {
			entry := d.Pool + "/" + d.Device
			if d.NetworkData != nil {
				entry += " " + d.NetworkData.InterfaceName
			}
			have[entry] = true
		}
		return slices.Sorted(maps.Keys(have))
	}
	writer := func(node string) *Writer {
		return NewWriter(WriterParams{Client: NewClaimClient(getter), DriverName: testDriver, NodeName: node, BootID: testBoot})
	}
	rows := func(claim Ref, attachment *types.Attachment) []*tables.DRAAllocation {
		return []*tables.DRAAllocation{{DeviceName: "a", Pool: "pool", ClaimNamespace: claim.Namespace, ClaimName: claim.Name, ClaimUID: claim.UID,
			PodUID: "uid", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{Name: "a"}, Attachment: attachment}}
	}
	net0, net1 := &types.Attachment{IfName: "net0"}, &types.Attachment{IfName: "net1"}

	t.Run("two nodes", func(t *testing.T) {
		claim, _ := create(t, "two", testNode, otherNode)
		one, two := writer(testNode), writer(otherNode)
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, net0)))
		require.NoError(t, two.Apply(t.Context(), claim, rows(claim, net1)))
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-1/pool/a net0", "node-2/pool/a net1"}, entries(t, claim))
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, nil)))
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-1/pool/a", "node-2/pool/a net1"}, entries(t, claim))
		require.NoError(t, one.Apply(t.Context(), claim, nil))
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-2/pool/a net1"}, entries(t, claim))
		require.NoError(t, two.Apply(t.Context(), claim, nil))
		require.Equal(t, []string{"node-1/gpus/gpu-0"}, entries(t, claim))
	})

	// A named claim moves to another node under its UID; what the former one is late with must not touch it.
	t.Run("moved", func(t *testing.T) {
		claim, status := create(t, "moved", testNode)
		former, next := writer(testNode), writer(otherNode)
		require.NoError(t, former.Apply(t.Context(), claim, rows(claim, net0)))
		setStatus(t, claim.Name, resourceapi.ResourceClaimStatus{}, "scheduler")
		status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{gpu, net(otherNode)}
		setStatus(t, claim.Name, status, "scheduler")
		require.NoError(t, next.Apply(t.Context(), claim, rows(claim, net1)))
		before := get(t, claim.Name)

		require.NoError(t, former.Apply(t.Context(), claim, nil))
		require.Equal(t, before, get(t, claim.Name), "nothing is written")
		require.Empty(t, former.written)
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-2/pool/a net1"}, entries(t, claim))
	})

	// Former versions wrote as the driver's field manager, whatever the node.
	t.Run("former version", func(t *testing.T) {
		claim, _ := create(t, "former", testNode, otherNode)
		asFormer := func(config []deviceStatus) {
			t.Helper()
			apply := applyConfigOf(claim, testDriver, config, transitionsOf(config, nil, get(t, claim.Name).CreationTimestamp.Time))
			_, err := claims.ApplyStatus(t.Context(), apply, metav1.ApplyOptions{FieldManager: testDriver, Force: true})
			if refusesAllocation(err) {
				status := get(t, claim.Name).Status
				wanted, err := configured(apply)
				require.NoError(t, err)
				status.Devices = append(slices.DeleteFunc(status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool { return d.Driver == testDriver }), wanted...)
				setStatus(t, claim.Name, status, testDriver)
				return
			}
			require.NoError(t, err)
		}
		attached, err := statusesOf(rows(claim, net0), testNode, testBoot, "")
		require.NoError(t, err)
		asFormer(attached)
		require.NoError(t, writer(otherNode).Apply(t.Context(), claim, rows(claim, net1)))

		// What the former version has written as well is taken over, taken back in part, and in whole.
		one := writer(testNode)
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, net0)))
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, nil)))
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-1/pool/a", "node-2/pool/a net1"}, entries(t, claim))
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, net1)))
		require.NoError(t, one.Apply(t.Context(), claim, nil))
		require.Equal(t, []string{"node-1/gpus/gpu-0", "node-2/pool/a net1"}, entries(t, claim))

		// After a downgrade the record is there, whoever takes it over.
		require.NoError(t, one.Apply(t.Context(), claim, rows(claim, net0)))
		asFormer(attached)
		require.Contains(t, entries(t, claim), "node-1/pool/a net0")
		require.NoError(t, one.Apply(t.Context(), claim, nil))
		require.NotContains(t, entries(t, claim), "node-1/pool/a net0")

		// What only the former version has written is taken back.
		claim, _ = create(t, "former-only", testNode)
		attached, err = statusesOf(rows(claim, net0), testNode, testBoot, "")
		require.NoError(t, err)
		asFormer(attached)
		require.NoError(t, writer(testNode).Apply(t.Context(), claim, nil))
		require.Equal(t, []string{"node-1/gpus/gpu-0"}, entries(t, claim))
	})
}
