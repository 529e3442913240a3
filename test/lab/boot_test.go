// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

// bootingNode is a node whose machine is a process that does nothing, and whose agent says what answer returns.
func bootingNode(t *testing.T, answer func() guest.Health) *Node {
	t.Helper()
	l := &Lab{state: t.TempDir(), nodeOptions: NodeOptions{PFs: 1}}
	n := l.newNode(1)
	spawner, err := proc.NewSpawner("", false)
	require.NoError(t, err)
	t.Cleanup(spawner.Close)
	p, err := spawner.Start(proc.Command{Name: n.Name(), Args: []string{"sleep", "1000"}, Log: filepath.Join(t.TempDir(), "log")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop(0)) })
	l.processes.Set(n.Name(), p)
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if answer == nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(answer())
	}))
	t.Cleanup(agent.Close)
	n.agent.base, n.agent.http = agent.URL, agent.Client()
	return n
}

func TestSilentMachineHangs(t *testing.T) {
	n := bootingNode(t, nil)
	require.ErrorContains(t, n.waitBooted(t.Context(), "", 0), "has said nothing for 0s")
}

// On a busy machine it takes long until the daemons are started. A machine whose agent answers meanwhile does not hang.
func TestSlowMachineIsWaitedFor(t *testing.T) {
	var asked atomic.Int32
	n := bootingNode(t, func() guest.Health { return guest.Health{BootID: "b", Booted: asked.Add(1) > 3} })
	require.NoError(t, n.waitBooted(t.Context(), "", 0))
	require.EqualValues(t, 4, asked.Load())
}

func TestMachineThatEndsIsNotWaitedFor(t *testing.T) {
	n := bootingNode(t, nil)
	require.NoError(t, n.lab.processes.Get(n.Name()).Stop(0))
	require.ErrorContains(t, n.waitBooted(t.Context(), "", time.Hour), "its machine ended")
}
