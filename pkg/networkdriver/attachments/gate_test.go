// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// OpenGate notes which containers may start.
func (w *fakeWorld) OpenGate(g cdi.Gate) error {
	w.write().Abort()
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.fail["open "+string(g.Claim)]; err != nil {
		return err
	}
	w.gates[g.Claim] = g.Sandbox + " " + strings.Join(g.Requests, ",")
	w.opened = g
	return nil
}

func (w *fakeWorld) Warn(s Sandbox, reason, _ string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, s.PodName+" "+reason)
}

// CloseGate must come before the links leave.
func (w *fakeWorld) CloseGate(claim kubetypes.UID) {
	w.write().Abort()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.gates, claim)
}

func (w *fakeWorld) WasOpened(claim kubetypes.UID, sandbox string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.HasPrefix(w.gates[claim], sandbox+" ")
}

func (w *fakeWorld) CloseOtherGates(claims []kubetypes.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for claim := range w.gates {
		if !slices.Contains(claims, claim) {
			delete(w.gates, claim)
		}
	}
}

func (w *fakeWorld) ReadMarkers(environment, _ []string) []cdi.Marker {
	return cdi.MarkersIn(environment)
}

// gate says which sandbox the gate of the pod's claim is open for, and for which requests.
func (f *fixture) gate(pod kubetypes.UID) string {
	f.world.mu.Lock()
	defer f.world.mu.Unlock()
	return f.world.gates["claim-of-"+pod]
}

// marked is the environment of a container that the pod's claim was resolved for.
func marked(pod kubetypes.UID, sandbox string) []string {
	return []string{"PATH=/bin", "NETWORKDRIVER_CLAIM_X=claim-of-" + string(pod) + "/" + sandbox}
}

// Of hardware the hook is told which it is, to see whether it is lost. Of a device with several links nobody knows which is meant.
func TestGateKnowsTheHardware(t *testing.T) {
	f := newFixture(t)
	row, _ := f.newRow("pod", "dummy", 1)
	f.insert(row)
	for i, id := range []nic.Identity{nic.PCI("0000:03:00.1"), {Bus: "pci", Device: "0000:03:00.2", PermMAC: "02:00:00:00:00:01"}} {
		f.world.put(id, "")
		f.insert(row.With(func(r *tables.DRAAllocation) {
			r.DeviceName = fmt.Sprint("vf", i)
			r.PreparedDevice = fakeDevice{Name: r.DeviceName, ID: id}
		}))
	}
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s1")))
	require.Equal(t, []gatehook.Device{{Bus: "pci", Name: "0000:03:00.1"}}, f.world.opened.Hardware)
}

// The gate is open while the devices are in the sandbox.
func TestGateFollowsTheDevices(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	vfio, _ := f.newRow("pod", "vfio", -1)
	vfio.Request = "user"
	f.insert(vfio)
	pod := newSandbox("pod", "s1")
	require.Empty(t, f.gate("pod"))
	require.NoError(t, f.Attach(t.Context(), pod))
	require.Equal(t, "s1 net,user", f.gate("pod"))
	opened := cdi.Gate{
		Claim: "claim-of-pod", Requests: []string{"net", "user"}, Sandbox: "s1", NetNS: pod.NetNS, ClaimName: "default/claim", Pod: "default/pod",
	}
	require.Equal(t, opened, f.world.opened)
	f.world.opened = cdi.Gate{}
	f.Synchronize(t.Context(), []Sandbox{pod})
	require.Equal(t, opened, f.world.opened)

	// It is closed before the first link leaves.
	release := f.world.hold("detach a")
	done := make(chan error)
	go func() { done <- f.Detach(t.Context(), pod) }()
	require.Eventually(t, f.world.seen("detach a"), waitFor, tick)
	require.Empty(t, f.gate("pod"))
	release()
	require.NoError(t, <-done)

	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s2")))
	require.Equal(t, "s2 net,user", f.gate("pod"))
	require.NoError(t, f.release(t.Context(), "pod"))
	require.Empty(t, f.gate("pod"))
}

// driven is a device that programs drive themselves.
type driven struct {
	fakeDevice
	missing error
	node    string
}

func (d driven) Exposes(config types.DeviceConfig) bool { return config.Driver != "" }

func (d driven) Exposure(types.DeviceConfig) (types.Exposure, error) {
	return types.Exposure{Address: d.Name, Nodes: []string{"/dev/" + d.Name + d.node}}, d.missing
}

// Containers get the nodes of such a device for as long as it is in their sandbox, and may lock memory.
func TestGateOfDrivenDevice(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	row, dev := f.newRow("pod", "vfio", -1)
	row.PreparedDevice, row.Config, row.PodClaim = driven{fakeDevice: dev}, types.DeviceConfig{Driver: types.DriverVFIO}, "nets"
	f.insert(row)
	plain, dev := f.newRow("pod", "bound", -1)
	plain.PreparedDevice = driven{fakeDevice: dev}
	f.insert(plain)
	f.prepare("other", "b", 2)
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s1")))
	require.Equal(t, []cdi.Exposed{{Request: "net", PodClaim: "nets", Exposure: types.Exposure{Address: "vfio", Nodes: []string{"/dev/vfio"}}}}, f.world.opened.Exposed)
	require.True(t, f.LocksMemory(marked("pod", "s1")))
	require.False(t, f.LocksMemory([]string{"PATH=/bin"}))
	require.False(t, f.LocksMemory(marked("other", "s1")))

	f.world.takeCalls()
	f.Ensure(t.Context(), func(kubetypes.UID) []Sandbox { return []Sandbox{newSandbox("pod", "s1")} })
	require.Empty(t, f.world.takeCalls(), "it has no link that could have left")
	require.NoError(t, f.Detach(t.Context(), newSandbox("pod", "s1")))
	require.Empty(t, f.gate("pod"))

	row.PodClaim = ""
	require.NoError(t, f.release(t.Context(), "pod"))
	f.insert(row)
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s2")))
	require.Equal(t, "claim", f.world.opened.Exposed[0].PodClaim, "a named claim is called what it is")
}

// A device that is set up again on its way into the sandbox may have other nodes, as that of an IOMMU group that has another number.
func TestGateOfDeviceMadeAnew(t *testing.T) {
	f := newFixture(t)
	row, dev := f.newRow("pod", "vf", -1)
	row.PreparedDevice, row.Config = driven{fakeDevice: dev}, types.DeviceConfig{Driver: types.DriverVFIO}
	f.insert(row)
	f.world.fail["check vf"] = errors.New("it was made anew")
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s1")))
	require.Equal(t, []string{"/dev/vf-again"}, f.world.opened.Exposed[0].Nodes)
}

// The nodes of a device are looked for when it is in the sandbox. Without them no container starts, and it is tried again.
func TestGateOfMissingNodes(t *testing.T) {
	f := newFixture(t)
	row, dev := f.newRow("pod", "vf", -1)
	row.PreparedDevice, row.Config = driven{fakeDevice: dev, missing: errors.New("no device node for verbs")}, types.DeviceConfig{Driver: types.DriverVFIO}
	f.insert(row)
	require.ErrorContains(t, f.Attach(t.Context(), newSandbox("pod", "s1")), "no device node for verbs")
	require.Empty(t, f.gate("pod"))
	require.True(t, f.LocksMemory(marked("pod", "s1")), "which looks for nothing")

	attached := row.With(func(r *tables.DRAAllocation) {
		r.Attachment = &types.Attachment{SandboxID: "s1", NetNS: newSandbox("pod", "s1").NetNS}
	})
	require.NoError(t, f.release(t.Context(), "pod"))
	f.insert(attached)
	f.Synchronize(t.Context(), []Sandbox{newSandbox("pod", "s1")})
	require.Empty(t, f.gate("pod"))
	require.Contains(t, f.row("vf").Error, "no device node for verbs")
}

// A gate that stays closed is an attach that failed, and nothing is left in the pod.
func TestGateThatCannotBeOpened(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	f.world.fail["open claim-of-pod"] = errors.New("no space left on device")
	require.ErrorContains(t, f.Attach(t.Context(), newSandbox("pod", "s1")), "default/claim: no space left on device")
	f.at(a, "", "")
	require.Contains(t, f.row("a").Error, "no space left on device")
	require.Empty(t, f.gate("pod"))

	clear(f.world.fail)
	pod := newSandbox("pod", "s2")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.at(a, pod.NetNS, "s2")
	require.Empty(t, f.row("a").Error)
}

// A failed attach leaves no gate open, that of the pod's other claim included.
func TestGateAfterFailedAttach(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	other, _ := f.newRow("pod", "b", 2)
	other.ClaimUID = "claim-of-other"
	f.insert(other)
	f.world.fail["open claim-of-pod"] = errors.New("no")
	require.Error(t, f.Attach(t.Context(), newSandbox("pod", "s1")))
	require.Empty(t, f.world.gates)
}

// A device that is lost, or is kept out of its pod, holds the containers back, also while the agent is away later on.
func TestGateOfALostDevice(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.end(vf.ID)
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.gate("pod"))

	f.world.put(vf.ID, "")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Equal(t, "s1 net", f.gate("pod"))

	f.world.put(vf.ID, "")
	f.world.change("vf")
	f.world.fail["setup vf"] = errors.New("refused")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.gate("pod"))

	delete(f.world.fail, "setup vf")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Equal(t, "s1 net", f.gate("pod"))
	f.world.put(vf.ID, "nested")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Equal(t, "s1 net", f.gate("pod"), "what the pod has moved is its own")
}

// After a restart the gates are what the sandboxes say.
func TestGateAfterRestart(t *testing.T) {
	f := newFixture(t)
	inside, dev := f.newRow("inside", "a", 1)
	gone, _ := f.newRow("gone", "b", 2)
	late, _ := f.newRow("late", "c", 3)
	pod := newSandbox("inside", "s1")
	f.world.put(dev.ID, pod.NetNS)
	f.world.gates = map[kubetypes.UID]string{
		"claim-of-inside": "s1 net", "claim-of-gone": "s0 net", "claim-of-late": "s0 net", "claim-of-nobody": "s9 net",
	}
	require.NoError(t, f.Restore([]*tables.DRAAllocation{inside, gone, late}))
	require.Equal(t, "s1 net", f.gate("inside"), "a restart does not close it")
	require.Empty(t, f.gate("nobody"))

	f.world.gates["claim-of-inside"] = ""
	f.Synchronize(t.Context(), []Sandbox{pod, newSandbox("late", "s2")})
	require.Equal(t, "s1 net", f.gate("inside"))
	require.Empty(t, f.gate("gone"))
	require.Equal(t, "s2 net", f.gate("late"))
}

// A second pod of a claim is refused, and is told who has the device and what to do.
func TestAdmit(t *testing.T) {
	f := newFixture(t)
	f.prepare("one", "a", 1)
	one, two := newSandbox("one", "s1"), newSandbox("two", "s2")
	require.NoError(t, f.Attach(t.Context(), one))
	require.NoError(t, f.Attach(t.Context(), two), "kubelet has prepared nothing for it")
	require.NoError(t, f.Admit(one, marked("one", "s1"), nil))
	require.NoError(t, f.Admit(one, marked("one", "s0"), nil), "the devices have come meanwhile")
	require.NoError(t, f.Admit(two, []string{"PATH=/bin"}, nil), "does not use the claim")

	err := f.Admit(two, marked("one", "s1"), nil)
	for _, part := range []string{"claim default/claim is in use by pod default/one", "device a", "ResourceClaimTemplate", "Recreate"} {
		require.ErrorContains(t, err, part)
	}
	require.Equal(t, []string{"two ClaimInUse"}, f.world.events)
	require.NoError(t, f.Detach(t.Context(), one))
	require.ErrorContains(t, f.Admit(one, marked("one", "s1"), nil), "not in the sandbox")
	require.NoError(t, f.release(t.Context(), "one"))
	require.ErrorContains(t, f.Admit(two, marked("one", "s1"), nil), "claim-of-one is not prepared")
}

// A record names a pod by UID only. A pod of another namespace gets nothing by it.
func TestClaimOfAnotherNamespace(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	pod.PodNamespace = "elsewhere"
	require.ErrorContains(t, f.Attach(t.Context(), pod), "not in the namespace of pod elsewhere/pod")
	f.at(a, "", "")
}

// Which pod has had a device is known for as long as the row is.
func TestHeld(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	f.world.fail["attach a"] = errors.New("no")
	require.Error(t, f.Attach(t.Context(), pod))
	require.False(t, f.row("a").Held)
	clear(f.world.fail)
	require.NoError(t, f.Attach(t.Context(), pod))
	require.NoError(t, f.Detach(t.Context(), pod))
	require.True(t, f.row("a").Held)
}
