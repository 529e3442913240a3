// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package netnamespace

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
)

// TestNamespaceOfAnotherUsersProcess is about a pod that does not run as root, and whose namespace has lost its name: it
// is the process that leads there, which takes CAP_SYS_PTRACE.
func TestNamespaceOfAnotherUsersProcess(t *testing.T) {
	testenv.Privileged(t)
	cmd := exec.CommandContext(t.Context(), "cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, Pdeathsig: unix.SIGKILL,
	}
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	// It ends with its input: to kill it would take a capability of its own.
	defer func() {
		require.NoError(t, input.Close())
		require.NoError(t, cmd.Wait())
	}()
	var st unix.Stat_t
	path := fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)
	require.NoError(t, unix.Stat(path, &st), "look at the namespace of the process")
	found := false
	for ns := range Reachable(t.Context(), idOf(t, "/proc/thread-self/ns/net")) {
		found = found || ns.ID == ID{Dev: st.Dev, Ino: st.Ino}
	}
	require.True(t, found)
}
