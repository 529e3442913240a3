// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Check finds what is set to fail, until the device is set up again.
func (w *fakeWorld) Check(_ context.Context, rows []*tables.DRAAllocation) []error {
	w.write().Abort()
	w.mu.Lock()
	errs := make([]error, len(rows))
	for i, row := range rows {
		errs[i] = w.fail["check "+row.DeviceName]
	}
	w.mu.Unlock()
	if w.afterCheck != nil {
		w.afterCheck()
	}
	return errs
}

// remake is what a change of the number of VFs does: the VF is on the host, in no VLAN, with a new link.
func (w *fakeWorld) remake(vf fakeDevice) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.made++
	w.place[vf.ID] = ""
	w.fail["check "+vf.Name] = types.AstrayError{Reason: "the PF has it with no VLAN"}
}

// change has somebody change what Setup made of a device.
func (w *fakeWorld) change(device string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail["check "+device] = errors.New("the PF has it in VLAN 6")
}

// none are the sandboxes of a node without any.
func none(kubetypes.UID) ([]Sandbox, error) { return nil, nil }

// sandboxesOf lists sandboxes as the runtime's side does.
func sandboxesOf(all ...Sandbox) func(kubetypes.UID) []Sandbox {
	return func(pod kubetypes.UID) (list []Sandbox) {
		for _, s := range all {
			if s.PodUID == pod {
				list = append(list, s)
			}
		}
		return list
	}
}

// The VLAN comes first, the link second: in the hook, late, and when the VLAN cannot be set the link stays out.
func TestEnsureBeforeAttach(t *testing.T) {
	pod := newSandbox("pod", "s1")
	for name, attach := range map[string]func(*fixture){
		"hook":  func(f *fixture) { _ = f.Attach(t.Context(), pod) },
		"late":  func(f *fixture) { f.Synchronize(t.Context(), []Sandbox{pod}) },
		"retry": func(f *fixture) { f.Ensure(t.Context(), sandboxesOf(pod)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			vf := f.prepareVF("vf", "0000:03:00.1")
			f.world.change("vf")
			f.world.fail["setup vf"] = errors.New("PF is busy")
			attach(f)
			f.at(vf, "", "")
			require.Equal(t, "set the device up again, since the PF has it in VLAN 6: PF is busy", f.row("vf").Error)
			require.False(t, f.InPlace("pod", "s1"))

			delete(f.world.fail, "setup vf")
			f.world.takeCalls()
			attach(f)
			f.at(vf, pod.NetNS, "s1")
			require.Empty(t, f.row("vf").Error)
			require.Equal(t, []string{"setup vf", "attach vf"}, f.world.takeCalls())
		})
	}
}

// What is moved is the link that was there when its VF was looked at. A VF that was made anew since then is looked at, and set up,
// first; one that is made anew again and again stays out.
func TestMadeAnewBeforeTheMove(t *testing.T) {
	former, pod := newSandbox("pod", "s0"), newSandbox("pod", "s1")
	for name, before := range map[string]func(f *fixture, vf fakeDevice){
		"on the host":     func(*fixture, fakeDevice) {},
		"in a former one": func(f *fixture, _ fakeDevice) { require.NoError(t, f.Attach(t.Context(), former)) },
		"in a third one":  func(f *fixture, vf fakeDevice) { f.world.put(vf.ID, "elsewhere") },
		"in the sandbox":  func(f *fixture, vf fakeDevice) { f.world.put(vf.ID, pod.NetNS) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			vf := f.prepareVF("vf", "0000:03:00.1")
			before(f, vf)
			once := sync.OnceFunc(func() { f.world.remake(vf) })
			f.world.afterCheck = once
			require.NoError(t, f.Attach(t.Context(), pod))
			f.at(vf, pod.NetNS, "s1")
			require.NoError(t, f.world.fail["check vf"], "it is in the pod as it was made")

			f = newFixture(t)
			vf = f.prepareVF("vf", "0000:03:00.1")
			before(f, vf)
			f.world.afterCheck = func() { f.world.remake(vf) }
			require.ErrorContains(t, f.Attach(t.Context(), pod), "its link is another one")
			f.at(vf, "", "")
		})
	}
}

// What somebody changes under a pod is put back, and what cannot be is in the row, and said once.
func TestEnsure(t *testing.T) {
	f := newFixture(t)
	var log bytes.Buffer
	f.log = slog.New(slog.NewTextHandler(&log, nil))
	vf := f.prepareVF("vf", "0000:03:00.1")
	f.prepare("other", "waiting", 7)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.takeCalls()
	ensure := func() { f.Ensure(t.Context(), sandboxesOf(pod)) }

	f.insert(f.row("waiting").With(func(r *tables.DRAAllocation) { r.Error = "attach: the name is taken" }))
	before := f.rows()
	ensure()
	require.Empty(t, f.world.takeCalls(), "nothing has changed")
	require.Equal(t, before, f.rows())

	f.world.change("vf")
	f.world.change("waiting")
	log.Reset()
	ensure()
	require.ElementsMatch(t, []string{"setup vf", "setup waiting"}, f.world.takeCalls())
	f.at(vf, pod.NetNS, "s1")
	require.Equal(t, 2, strings.Count(log.String(), "was set up again"), log.String())
	require.Contains(t, log.String(), `reason="the PF has it in VLAN 6"`)

	f.world.change("vf")
	f.world.change("waiting")
	f.world.fail["setup vf"], f.world.fail["setup waiting"] = errors.New("refused"), errors.New("refused")
	log.Reset()
	for range 3 {
		ensure()
		for _, device := range []string{"vf", "waiting"} {
			require.Equal(t, "Failed", f.row(device).State())
			require.Contains(t, f.row(device).Error, "refused")
		}
	}
	f.at(vf, pod.NetNS, "s1")
	require.Equal(t, 2, strings.Count(log.String(), "level=ERROR"), log.String())
	delete(f.world.fail, "setup vf")
	ensure()
	require.Equal(t, "Attached", f.row("vf").State())

	delete(f.world.fail, "setup waiting")
	f.world.end(f.row("waiting").PreparedDevice.Link())
	ensure()
	require.Empty(t, f.row("waiting").Error)
	require.Equal(t, 107, f.row("waiting").PreparedDevice.Link().Index, "what Setup returned is in the row")
	require.Equal(t, 107, f.world.notedIndex, "and in the journal")
}

// A device that sends into another tenant's network, and cannot be put right, is taken out of its pod wherever that keeps it. It
// comes back when it could be.
func TestEnsureExpels(t *testing.T) {
	pod := newSandbox("pod", "s1")
	for name, tt := range map[string]struct {
		// before is what happens to the link, or to the agent, before.
		before func(f *fixture, vf fakeDevice)
		ensure func(f *fixture)
	}{
		"in its pod": {ensure: func(f *fixture) { f.Ensure(t.Context(), sandboxesOf(pod)) }},
		"moved on": {
			before: func(f *fixture, vf fakeDevice) {
				f.world.put(vf.ID, "nested")
				f.Ensure(t.Context(), sandboxesOf(pod))
				require.Equal(t, "Moved", f.row("vf").State())
			},
			ensure: func(f *fixture) { f.Ensure(t.Context(), sandboxesOf(pod)) },
		},
		"after a restart": {
			before: func(f *fixture, _ fakeDevice) {
				f.insert(f.row("vf").With(func(r *tables.DRAAllocation) { r.Attachment = nil }))
			},
			ensure: func(f *fixture) { f.Synchronize(t.Context(), []Sandbox{pod}) },
		},
		"in a former sandbox": {
			before: func(f *fixture, vf fakeDevice) {
				f.world.put(vf.ID, "/run/netns/s0")
				f.insert(f.row("vf").With(func(r *tables.DRAAllocation) {
					r.Attachment = &types.Attachment{SandboxID: "s0", NetNS: "/run/netns/s0"}
				}))
			},
			ensure: func(f *fixture) { _ = f.Attach(t.Context(), pod) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			vf := f.prepareVF("vf", "0000:03:00.1")
			require.NoError(t, f.Attach(t.Context(), pod))
			if tt.before != nil {
				tt.before(f, vf)
			}
			astray := types.AstrayError{Reason: "the PF has it in VLAN 6"}
			f.world.fail["check vf"], f.world.fail["setup vf"] = astray, errors.New("refused")
			f.world.takeCalls()
			tt.ensure(f)
			f.at(vf, "", "")
			require.Equal(t, "set the device up again, since the PF has it in VLAN 6: refused", f.row("vf").Error)
			require.Equal(t, 1, strings.Count(strings.Join(f.world.takeCalls(), " "), "detach vf"))
			require.Empty(t, f.world.gates)
			require.Len(t, f.world.events, 1)
			require.Contains(t, f.world.events[0], "DeviceExpelled")
			require.ErrorContains(t, f.Attach(t.Context(), pod), "refused", "containers do not start")

			for range 2 {
				f.Ensure(t.Context(), sandboxesOf(pod))
			}
			require.NotContains(t, f.world.takeCalls(), "detach vf", "once is enough")
			require.Len(t, f.world.events, 1)
			delete(f.world.fail, "setup vf")
			f.Ensure(t.Context(), sandboxesOf(pod))
			f.at(vf, pod.NetNS, "s1")
			require.Empty(t, f.row("vf").Error)
			require.NotEmpty(t, f.world.gates)
		})
	}
}

// A device that a program of the pod has itself cannot be taken from it. No container starts with it any more, and the pod is told.
func TestEnsureCannotExpel(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "vfio", -1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	require.NotEmpty(t, f.world.gates)
	f.world.fail["check vfio"], f.world.fail["setup vfio"] = types.AstrayError{Reason: "the PF has it in VLAN 6"}, errors.New("refused")
	for range 2 {
		f.Ensure(t.Context(), sandboxesOf(pod))
		require.Contains(t, f.row("vfio").Error, "refused; the device has no interface that could be taken out of the pod: delete the pod")
		require.NotNil(t, f.row("vfio").Attachment)
		require.Empty(t, f.world.gates)
	}
	require.Equal(t, []string{"pod DeviceAstray"}, f.world.events)
	delete(f.world.fail, "setup vfio")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.row("vfio").Error)
	require.NotEmpty(t, f.world.gates)
}

// The link of a VF that was made anew is on the host while its row says that it is in the pod.
func TestEnsureAttachesAgain(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.takeCalls()

	f.world.put(vf.ID, "")
	f.world.change("vf")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Equal(t, []string{"setup vf", "detach vf", "attach vf"}, f.world.takeCalls())
	f.at(vf, pod.NetNS, "s1")
	require.True(t, f.row("vf").Attachment.Again)

	// It is gone for a while, and what is gone is not in place.
	f.world.end(vf.ID)
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Contains(t, f.row("vf").Error, "the device is lost")
	require.Nil(t, f.row("vf").Attachment)
	f.world.put(vf.ID, "")
	f.Ensure(t.Context(), sandboxesOf(pod))
	f.at(vf, pod.NetNS, "s1")
	require.True(t, f.row("vf").Attachment.Again)
	require.Empty(t, f.row("vf").Error)
	f.Synchronize(t.Context(), []Sandbox{pod})
	require.True(t, f.row("vf").Attachment.Again)

	// What the pod moved on is where it belongs.
	f.world.put(vf.ID, "nested")
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Equal(t, "Moved", f.row("vf").State())
	f.world.takeCalls()
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.world.takeCalls())

	require.NoError(t, f.Detach(t.Context(), pod))
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s2")))
	require.False(t, f.row("vf").Attachment.Again, "a sandbox that it was not in before")
}

// A sandbox that stops while Ensure waits does not get its devices back, and what is being released is left alone.
func TestEnsureLeavesAlone(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.put(vf.ID, "")
	f.world.takeCalls()
	f.Ensure(t.Context(), sandboxesOf())
	require.Empty(t, f.world.takeCalls())

	require.NoError(t, f.Detach(t.Context(), pod))
	f.world.change("vf")
	f.world.takeCalls()
	f.insert(f.row("vf").With(func(r *tables.DRAAllocation) { r.Releasing, r.Error = true, "free: no" }))
	f.Ensure(t.Context(), sandboxesOf(pod))
	f.Synchronize(t.Context(), []Sandbox{pod})
	require.Empty(t, f.world.takeCalls())
	f.at(vf, "", "")
}

// fakeChecker counts how often it is asked.
type fakeChecker struct{ asked int }

func (c *fakeChecker) Check(_ context.Context, devices []types.Prepared) []error {
	c.asked++
	errs := make([]error, len(devices))
	for i, p := range devices {
		errs[i] = errors.New(p.Device.IfName())
	}
	return errs
}

// A link that did not come home when its sandbox ended is tried again, so that the next pod of its claim need not wait for
// kubelet, which does not ask for it back as long as it knows of that pod.
func TestEnsureBringsHome(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.fail["detach vf"] = errors.New("busy")
	require.Error(t, f.Detach(t.Context(), pod))
	f.Ensure(t.Context(), sandboxesOf())
	f.at(vf, pod.NetNS, "s1")
	require.Equal(t, "busy", f.row("vf").Error)

	delete(f.world.fail, "detach vf")
	f.Ensure(t.Context(), sandboxesOf())
	f.at(vf, "", "")
	require.Empty(t, f.row("vf").Error)
}

// A sandbox may end without an event: its devices come home all the same, so that the claim can be released or passed on. One
// whose namespace cannot be seen keeps what is in it.
func TestEnsureSandboxEndedInSilence(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	dummy := f.prepare("pod", "dummy", 7)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.gone[pod.NetNS] = true
	f.world.put(vf.ID, "nobody knows")
	f.world.put(dummy.ID, "nobody knows")
	f.world.takeCalls()
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.world.takeCalls())

	f.world.put(vf.ID, "") // as the kernel does
	f.world.end(dummy.ID)
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.ElementsMatch(t, []string{"detach vf", "detach dummy"}, f.world.takeCalls())
	for _, device := range []string{"vf", "dummy"} {
		require.Nil(t, f.row(device).Attachment)
		require.Empty(t, f.row(device).Error)
	}
	require.Empty(t, f.world.gates)
	f.Ensure(t.Context(), sandboxesOf(pod))
	require.Empty(t, f.world.takeCalls(), "once")
}

// Each manager is asked once, about its own devices.
func TestCheckOutside(t *testing.T) {
	checker := &fakeChecker{}
	o := &Outside{Checkers: map[types.DeviceManagerType]types.Checker{types.DeviceManagerTypeSRIOV: checker}}
	row := func(manager types.DeviceManagerType, name string) *tables.DRAAllocation {
		return &tables.DRAAllocation{Manager: manager, DeviceName: name, PreparedDevice: fakeDevice{Name: name}}
	}
	errs := o.Check(t.Context(), []*tables.DRAAllocation{
		row(types.DeviceManagerTypeSRIOV, "a"), row(types.DeviceManagerTypeDummy, "b"), row(types.DeviceManagerTypeSRIOV, "c"),
	})
	require.EqualError(t, errs[0], "a")
	require.NoError(t, errs[1])
	require.EqualError(t, errs[2], "c")
	require.Equal(t, 1, checker.asked)
	require.Equal(t, []error{nil}, o.Check(t.Context(), []*tables.DRAAllocation{row(types.DeviceManagerTypeDummy, "b")}))
	require.Equal(t, 1, checker.asked)
}
