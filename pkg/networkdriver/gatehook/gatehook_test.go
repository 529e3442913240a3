// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package gatehook

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// newContainer starts a process in a network namespace of its own, and returns its state and where it is.
func newContainer(t *testing.T, sandbox string) (state string, in Place) {
	t.Helper()
	testenv.Privileged(t)
	cmd := exec.CommandContext(t.Context(), "cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		require.NoError(t, input.Close())
		_ = cmd.Wait()
	})
	ns, err := netnamespace.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	require.NoError(t, err)
	ns.Close()
	return stateOf(cmd.Process.Pid, "io.kubernetes.cri.sandbox-id", sandbox), Place{NetNS: ns.ID, Sandbox: sandbox, Claim: "default/shared", Pod: "default/one"}
}

func stateOf(pid int, annotation, sandbox string) string {
	return fmt.Sprintf(`{"ociVersion":"1.2.0","id":"c","status":"creating","pid":%d,"bundle":"/b","annotations":{%q:%q,"a":"b"}}`, pid, annotation, sandbox)
}

// put makes the file say where the devices are, as the agent does.
func put(t testing.TB, file string, p Place) {
	t.Helper()
	data, err := json.Marshal(p)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file+".new", data, 0o600))
	require.NoError(t, os.Rename(file+".new", file))
}

func newFile(t *testing.T) string { return filepath.Join(t.TempDir(), "0b910db7"+Suffix) }

// decide lets nothing be waited for.
func decide(state, file string) error {
	return run(strings.NewReader(state), file, nil, "/sys", 0, nil)
}

// TestSandbox lets a container of the sandbox with the devices start, and no other one.
func TestSandbox(t *testing.T) {
	one, in := newContainer(t, "s1")
	two, _ := newContainer(t, "s2")
	file := newFile(t)
	put(t, file, in)
	require.NoError(t, decide(one, file))
	require.NoError(t, Run(strings.NewReader(one), file, nil))
	err := decide(two, file)
	for _, part := range []string{"claim default/shared is in use by pod default/one", "ResourceClaimTemplate", "Recreate", "made anew"} {
		require.ErrorContains(t, err, part)
	}
	require.NotContains(t, err.Error(), "\n")

	// The host's own, of a pod on the host network.
	require.ErrorContains(t, decide(stateOf(os.Getpid(), "", ""), file), "in use by")
	// Another kind of the same inode.
	elsewhere := in
	elsewhere.NetNS.Dev++
	put(t, file, elsewhere)
	require.ErrorContains(t, decide(one, file), "in use by")
}

// TestNamespaceUsedAgain is a sandbox made anew that the kernel has given the identity of the former one's namespace.
func TestNamespaceUsedAgain(t *testing.T) {
	state, in := newContainer(t, "new")
	file := newFile(t)
	in.Sandbox = "former"
	put(t, file, in)
	require.ErrorContains(t, decide(state, file), "in use by")
	for _, annotation := range sandboxAnnotations {
		state := strings.Replace(state, "io.kubernetes.cri.sandbox-id", annotation, 1)
		require.ErrorContains(t, decide(state, file), "in use by", annotation)
		require.NoError(t, decide(strings.Replace(state, `"new"`, `"former"`, 1), file), annotation)
	}
	// A runtime that names no sandbox.
	require.NoError(t, decide(strings.Replace(state, "io.kubernetes.cri.sandbox-id", "other", 1), file))
}

// TestLateAttach waits for devices that are just being attached, and no longer than it may take.
func TestLateAttach(t *testing.T) {
	one, in := newContainer(t, "s1")
	_, former := newContainer(t, "s0")
	for name, begin := range map[string]func(string){
		"moved":   func(file string) { put(t, file, former) },
		"missing": func(string) {},
	} {
		file := newFile(t)
		begin(file)
		looks := 0
		require.NoError(t, run(strings.NewReader(one), file, nil, "/sys", time.Hour, func(time.Duration) {
			if looks++; looks == 3 {
				put(t, file, in)
			}
		}), name)
		require.Equal(t, 3, looks, name)
	}
}

// TestLostDevice refuses a container whose pod has lost a device: it is gone, has no driver, or is on the host. One whose interface is in
// any other namespace is where the pod has it.
func TestLostDevice(t *testing.T) {
	state, in := newContainer(t, "s1")
	file, root := newFile(t), t.TempDir()
	in.Hardware = []Device{{"pci", "0000:03:00.1"}, {"pci", "0000:03:00.2"}}
	put(t, file, in)
	decide := func() error { return run(strings.NewReader(state), file, nil, root, 0, nil) }
	require.NoError(t, decide(), "without sysfs nothing is known")

	one, two := filepath.Join(root, "bus/pci/devices/0000:03:00.1"), filepath.Join(root, "bus/pci/devices/0000:03:00.2")
	require.NoError(t, os.MkdirAll(filepath.Join(one, "net"), 0o755))
	require.ErrorContains(t, decide(), "device 0000:03:00.2 of claim default/shared is lost: the device is not on the pci bus any more")
	require.NoError(t, os.MkdirAll(two, 0o755))
	require.ErrorContains(t, decide(), "device 0000:03:00.2 of claim default/shared is lost: the device has no driver")
	require.NoError(t, os.Symlink("/drivers/vfio-pci", filepath.Join(two, "driver")))
	require.ErrorContains(t, decide(), "is bound to vfio-pci and has no interface")
	require.NoError(t, os.MkdirAll(filepath.Join(two, "net"), 0o755))
	require.NoError(t, decide(), "both are in namespaces that this sysfs does not show")

	link := filepath.Join(one, "net/ens1f0v0")
	require.NoError(t, os.Mkdir(link, 0o755))
	err := decide()
	require.ErrorContains(t, err, "device 0000:03:00.1 of claim default/shared is lost: its interface ens1f0v0 is on the host")
	require.NotContains(t, err.Error(), "\n")
	// It comes back into the pod while it is waited for.
	require.NoError(t, run(strings.NewReader(state), file, nil, root, time.Hour, func(time.Duration) { _ = os.Remove(link) }))
}

// TestAnotherGroup refuses a container with the node of an IOMMU group that is not, or not any more, that of the claim's device.
func TestAnotherGroup(t *testing.T) {
	state, in := newContainer(t, "s1")
	file, root := newFile(t), t.TempDir()
	put(t, file, in)
	// Nothing is waited for.
	decide := func(groups ...string) error { return run(strings.NewReader(state), file, groups, root, time.Hour, nil) }
	dir := filepath.Join(root, "bus/pci/devices/0000:03:00.1")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	group := func(number string) {
		_ = os.Remove(filepath.Join(dir, "iommu_group"))
		require.NoError(t, os.Symlink("../../../kernel/iommu_groups/"+number, filepath.Join(dir, "iommu_group")))
	}
	own := Group{"0000:03:00.1", 15}.String()
	require.ErrorContains(t, decide(own), "device 0000:03:00.1 is lost: ", "it has none")
	group("15")
	require.NoError(t, decide(own))
	require.ErrorContains(t, decide(own, Group{"0000:03:00.2", 16}.String()), "device 0000:03:00.2 is lost: ", "it is gone")
	group("16")
	require.ErrorContains(t, decide(own), "device 0000:03:00.1 is lost: its IOMMU group was 15 and is 16")
	require.Error(t, decide("0000:03:00.1"), "no number")
}

// TestRefused refuses whatever is not known to be right.
func TestRefused(t *testing.T) {
	state, in := newContainer(t, "s1")
	dir := t.TempDir()
	content := func(name, content string) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		return file
	}
	good := filepath.Join(dir, "good")
	put(t, good, in)
	require.NoError(t, decide(state, good))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(good, link))
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	data, err := os.ReadFile(good)
	require.NoError(t, err)
	for name, c := range map[string]struct{ state, file, want string }{
		"no file":         {state, filepath.Join(dir, "0b910db7.json"), "the claim with uid 0b910db7 are in no pod"},
		"empty":           {state, content("empty", ""), "is not known"},
		"empty object":    {state, content("object", "{}"), "in use by"},
		"garbage":         {state, content("garbage", "x"), "is not known"},
		"too long":        {state, content("long", strings.Repeat(" ", maxPlace)+string(data)), "is not known"},
		"a link":          {state, link, "symbolic link"},
		"a pipe":          {state, pipe, "regular file"},
		"no state":        {"", good, "state of the container"},
		"broken state":    {state[:20], good, "state of the container"},
		"no process":      {`{"pid":0}`, good, "not a process"},
		"own process":     {`{"pid":-1}`, good, "not a process"},
		"another type":    {`{"pid":"self"}`, good, "state of the container"},
		"ended process":   {`{"pid":4194304}`, good, "network namespace of the container"},
		"endless state":   {`{"annotations":{"a":"` + strings.Repeat("x", maxState) + `"},"pid":1}`, good, "longer than"},
		"annotation type": {strings.Replace(state, `"b"`, `1`, 1), good, "state of the container"},
	} {
		require.ErrorContains(t, decide(c.state, c.file), c.want, name)
	}
}

// TestRuntimeThatWritesNoState does not keep the hook for ever.
func TestRuntimeThatWritesNoState(t *testing.T) {
	t.Parallel() // it takes its time
	r, w := io.Pipe()
	defer w.Close()
	require.ErrorContains(t, Run(r, newFile(t), nil), "did not come")
}

// BenchmarkProgram is what the hook costs a container's start, beside a program that does nothing, which is the price of any
// hook.
func BenchmarkProgram(b *testing.B) {
	dir := b.TempDir()
	program, file := filepath.Join(dir, "hook"), filepath.Join(dir, "uid"+Suffix)
	build := exec.CommandContext(b.Context(), "go", "build", "-ldflags=-s -w", "-o", program, "../../../cmd/networkdriver-hook")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(b, err, "%s", out)
	ns, err := netnamespace.Open("/proc/self/ns/net")
	require.NoError(b, err)
	ns.Close()
	// A bus of which sysfs tells nothing takes one look instead of three.
	put(b, file, Place{NetNS: ns.ID, Sandbox: "s1", Hardware: []Device{{"none", "0000:03:00.1"}, {"none", "0000:03:00.2"}}})
	took := func(name string, args ...string) time.Duration {
		cmd := exec.CommandContext(b.Context(), name, args...)
		cmd.Stdin = strings.NewReader(stateOf(os.Getpid(), sandboxAnnotations[0], "s1"))
		start := time.Now()
		require.NoError(b, cmd.Run())
		return time.Since(start)
	}
	var hook, nothing time.Duration
	for b.Loop() {
		hook += took(program, file)
		nothing += took("true")
	}
	b.ReportMetric(float64(hook.Microseconds())/float64(b.N), "µs/hook")
	b.ReportMetric(float64(nothing.Microseconds())/float64(b.N), "µs/true")
}
