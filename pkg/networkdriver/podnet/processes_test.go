// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestNamespaceOfAnotherUsersProcess is about a pod that does not run as root, and whose namespace has lost its name: it
// is the process that leads there, which takes CAP_SYS_PTRACE.
func TestNamespaceOfAnotherUsersProcess(t *testing.T) {
	f := setup(t)
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
	self, err := openNamespace("/proc/thread-self/ns/net")
	require.NoError(t, err)
	defer self.close()
	path := fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)
	require.NoError(t, unix.Stat(path, &st), "look at the namespace of the process")
	found := false
	for ns := range f.reachableNamespaces(f.ctx, self.id) {
		found = found || ns.id == namespaceID{dev: st.Dev, ino: st.Ino}
	}
	require.True(t, found)
}
