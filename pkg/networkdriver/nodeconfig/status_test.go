// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// recorder is an API server that notes what is written.
type recorder struct {
	writes []v2alpha1.CiliumNetworkDriverNodeConfigStatus
	uids   []types.UID
	fail   func(attempt int) error
	tries  int
}

func (r *recorder) writeStatus(_ context.Context, _ string, uid types.UID, status *v2alpha1.CiliumNetworkDriverNodeConfigStatus) error {
	r.tries++
	if r.fail != nil {
		if err := r.fail(r.tries); err != nil {
			return err
		}
	}
	r.writes = append(r.writes, *status.DeepCopy())
	r.uids = append(r.uids, uid)
	return nil
}

// startWriter runs a writer in a synctest bubble and stops it at the test's end.
func startWriter(t *testing.T, client statusClient) *StatusWriter {
	t.Helper()
	writer := newStatusWriter(slog.New(slog.DiscardHandler), client, "worker")
	health, _ := cell.NewSimpleHealth()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- writer.Run(ctx, health) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return writer
}

// pass lets time pass in the bubble, and the writer do what is due.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func nodeConfig(uid types.UID) *v2alpha1.CiliumNetworkDriverNodeConfig {
	return &v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: "worker", UID: uid, Generation: 1}}
}

func ready(generation int64, ok bool) v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	return v2alpha1.CiliumNetworkDriverNodeConfigStatus{
		ObservedGeneration: generation,
		Conditions:         []metav1.Condition{Condition(v2alpha1.ConditionReady, ok, "Applied", "")},
	}
}

func TestStatusWrittenOnChangeOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &recorder{}
		writer := startWriter(t, server)
		config := nodeConfig("a")

		writer.Update(config, ready(1, true))
		synctest.Wait()
		require.Len(t, server.writes, 1)
		written := server.writes[0].Conditions[0]
		require.Equal(t, metav1.ConditionTrue, written.Status)
		require.EqualValues(t, 1, written.ObservedGeneration)
		require.Equal(t, time.Now().Unix(), written.LastTransitionTime.Unix())

		pass(time.Hour)
		writer.Update(config, ready(1, true))
		pass(time.Hour)
		require.Equal(t, 1, server.tries, "the same status again")

		writer.Update(config, ready(2, true))
		synctest.Wait()
		require.Len(t, server.writes, 2)
		require.Equal(t, written.LastTransitionTime, server.writes[1].Conditions[0].LastTransitionTime, "the condition still holds")

		writer.Update(config, ready(2, false))
		synctest.Wait()
		require.Len(t, server.writes, 3)
		require.Equal(t, time.Now().Unix(), server.writes[2].Conditions[0].LastTransitionTime.Unix(), "the condition has changed")
	})
}

func TestStatusAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := nodeConfig("a")
		config.Status = complete(ready(1, true), config.Status, metav1.Now())
		pass(time.Hour)

		server := &recorder{}
		writer := startWriter(t, server)
		writer.Update(config, ready(1, true))
		synctest.Wait()
		require.Zero(t, server.tries, "the object has this status already")

		recreated := nodeConfig("b")
		writer.Update(recreated, ready(1, true))
		synctest.Wait()
		require.Equal(t, []types.UID{"b"}, server.uids, "a new object has no status")
	})
}

func TestStatusCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &recorder{}
		writer := startWriter(t, server)
		config := nodeConfig("a")

		const updates = 1000
		for i := range updates {
			status := ready(1, true)
			status.AllocatedDevices = int32(i + 1)
			writer.Update(config, status)
			pass(10 * time.Millisecond)
		}
		pass(writeInterval)
		require.EqualValues(t, updates, server.writes[len(server.writes)-1].AllocatedDevices, "the last one is written")
		longest := updates*10*time.Millisecond + writeInterval
		require.LessOrEqual(t, len(server.writes), writeBurst+int(longest/writeInterval))
	})
}

func TestStatusRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &recorder{fail: func(attempt int) error {
			if attempt <= 20 {
				return errors.New("connection refused")
			}
			return nil
		}}
		writer := startWriter(t, server)
		writer.Update(nodeConfig("a"), ready(1, false))

		pass(5 * time.Minute)
		require.Empty(t, server.writes)
		require.Less(t, server.tries, 13, "the delay grows")

		writer.Update(nodeConfig("a"), ready(1, true))
		pass(time.Hour)
		require.Equal(t, 21, server.tries)
		require.Len(t, server.writes, 1)
		require.Equal(t, metav1.ConditionTrue, server.writes[0].Conditions[0].Status, "the newest one is written")
	})
}

func TestStatusOfDeletedObject(t *testing.T) {
	for name, refusal := range map[string]error{
		"gone":     apierrors.NewNotFound(v2alpha1.Resource(v2alpha1.NodeConfigResource), "worker"),
		"replaced": errReplaced,
	} {
		t.Run(name, func(t *testing.T) { testStatusOfDeletedObject(t, refusal) })
	}
}

func testStatusOfDeletedObject(t *testing.T, refusal error) {
	synctest.Test(t, func(t *testing.T) {
		server := &recorder{fail: func(int) error { return refusal }}
		writer := startWriter(t, server)
		writer.Update(nodeConfig("a"), ready(1, true))
		pass(time.Hour)
		require.Equal(t, 1, server.tries, "not tried again")

		server.fail = nil
		writer.Update(nodeConfig("b"), ready(1, true))
		synctest.Wait()
		require.Equal(t, []types.UID{"b"}, server.uids)
	})
}

func TestComplete(t *testing.T) {
	var pfs []string
	for i := range v2alpha1.MaxPoolPFs + 1 {
		pfs = append(pfs, fmt.Sprintf("ens%d", i))
	}
	status := v2alpha1.CiliumNetworkDriverNodeConfigStatus{
		Managers:   []v2alpha1.DeviceManagerStatus{{Manager: "sr-iov"}, {Manager: "dummy"}},
		Pools:      []v2alpha1.DevicePoolStatus{{Name: "b", PFs: pfs}, {Name: "a"}},
		Conditions: []metav1.Condition{Condition("Ready", false, "Failed", strings.Repeat("ä", maxMessageLength)), Condition("Degraded", true, "Failed", "")},
	}
	for i := range 200 {
		status.SkippedDevices = append(status.SkippedDevices, v2alpha1.SkippedDevice{
			Manager: "dummy", Device: fmt.Sprintf("dummy%03d", 199-i), Reason: strings.Repeat("x", 2000),
		})
	}
	given := *status.DeepCopy()
	got := complete(status, v2alpha1.CiliumNetworkDriverNodeConfigStatus{}, metav1.Now())
	require.Equal(t, given, status, "the caller's status is not changed")

	require.Equal(t, []v2alpha1.DeviceManagerStatus{{Manager: "dummy"}, {Manager: "sr-iov"}}, got.Managers)
	require.Equal(t, []v2alpha1.DevicePoolStatus{{Name: "a"}, {Name: "b", PFs: slices.Sorted(slices.Values(pfs))[:v2alpha1.MaxPoolPFs]}}, got.Pools)
	require.Equal(t, "Degraded", got.Conditions[0].Type)
	require.LessOrEqual(t, len(got.Conditions[1].Message), maxMessageLength)
	require.True(t, utf8.ValidString(got.Conditions[1].Message))
	require.Len(t, got.SkippedDevices, v2alpha1.MaxSkippedDevices)
	require.Equal(t, "dummy000", got.SkippedDevices[0].Device)
	require.Len(t, got.SkippedDevices[0].Reason, v2alpha1.MaxReasonLength)

	slices.Reverse(status.Pools)
	slices.Reverse(status.SkippedDevices)
	require.Equal(t, got, complete(status, got, metav1.NewTime(time.Now().Add(time.Hour))), "order and time make no difference")
}

// An agent that ends says so, for nobody else does; whoever has written another status, such as one that the agent is gone, is corrected.
func TestStatusOfWhoIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &recorder{}
		writer := newStatusWriter(slog.New(slog.DiscardHandler), server, "worker")
		var told []string
		writer.Told = func(_ *v2alpha1.CiliumNetworkDriverNodeConfig, c metav1.Condition) {
			told = append(told, c.Type+" "+string(c.Status)+" "+c.Reason)
		}
		health, _ := cell.NewSimpleHealth()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- writer.Run(ctx, health) }()
		config := nodeConfig("a")
		writer.Update(config, ready(1, true))
		synctest.Wait()
		require.Len(t, server.writes, 1)

		seen := config.DeepCopy()
		seen.Status = server.writes[0]
		writer.Seen(seen)
		pass(time.Minute)
		require.Equal(t, 1, server.tries, "its own write is no news")

		seen.Status.Conditions[0].Status, seen.Status.Conditions[0].Reason = metav1.ConditionUnknown, "AgentGone"
		writer.Seen(seen)
		pass(time.Minute)
		require.Len(t, server.writes, 2)
		require.Equal(t, metav1.ConditionTrue, server.writes[1].Conditions[0].Status)
		other := nodeConfig("b")
		writer.Seen(other)
		writer.Seen(nil)
		pass(time.Minute)
		require.Equal(t, 2, server.tries)

		cancel()
		require.NoError(t, <-done)
		require.Len(t, server.writes, 3)
		require.Equal(t, metav1.ConditionFalse, server.writes[2].Conditions[0].Status)
		require.Equal(t, ReasonAgentStopped, server.writes[2].Conditions[0].Reason)
		require.Equal(t, []string{"Ready True Applied", "Ready True Applied"}, told)
	})
}
