// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

var (
	accepted = &registerapi.RegistrationStatus{PluginRegistered: true}
	refused  = &registerapi.RegistrationStatus{Error: "no such plugin type"}
)

func registered(s State) bool { return s.Registered }

func TestRegisterAndServe(t *testing.T) {
	f := newFixture(t, fakeClaims{
		prepare: func(_ context.Context, claim *resourceapi.ResourceClaim) (claims.Result, error) {
			if claim.Name == "bad" {
				return claims.Result{}, errors.New("request net: vlan: 5000 is not in 0..4094")
			}
			return claims.Result{Devices: []claims.PreparedDevice{{Request: "net/first", Pool: testNode + "/fast", Device: "dummy0"}}}, nil
		},
		unprepare: func(_ context.Context, uid kubetypes.UID) error {
			if uid == "bad-uid" {
				return errors.New("device dummy1 is not home")
			}
			return nil
		},
	}, nil)
	f.start()
	socket := f.kubelet(nil, accepted)
	f.waitState("registered", registered)
	assert.Equal(t, 1.0, testutil.ToFloat64(f.metrics.registered))

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var refs []*drapb.Claim
	for _, name := range []string{"good", "bad"} {
		_, err := f.client.ResourceV1().ResourceClaims("default").Create(ctx, &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: kubetypes.UID(name + "-uid")},
			Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		refs = append(refs, &drapb.Claim{Namespace: "default", Name: name, Uid: name + "-uid"})
	}
	registrar, plugin := f.config.socketPaths()
	conn, err := dial(plugin)
	require.NoError(t, err)
	defer conn.Close()
	client := drapb.NewDRAPluginClient(conn)

	prepared, err := client.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: refs})
	require.NoError(t, err)
	require.Len(t, prepared.Claims, 2)
	require.Len(t, prepared.Claims["good-uid"].Devices, 1)
	device := prepared.Claims["good-uid"].Devices[0]
	assert.Equal(t, []string{"net"}, device.RequestNames)
	assert.Equal(t, "worker-node-1/fast", device.PoolName)
	assert.Equal(t, "dummy0", device.DeviceName)
	assert.Equal(t, []string{f.config.DriverName + "/claim=good-uid_net"}, device.CdiDeviceIds)
	assert.Equal(t, "request net: vlan: 5000 is not in 0..4094", prepared.Claims["bad-uid"].Error)

	unprepared, err := client.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: refs})
	require.NoError(t, err)
	assert.Empty(t, unprepared.Claims["good-uid"].Error)
	assert.Equal(t, "device dummy1 is not home", unprepared.Claims["bad-uid"].Error)

	// Kubelet restarts and finds the socket.
	require.NoError(t, register(registrar, accepted))
	require.Eventually(t, func() bool { return f.log.Count("registered the driver again") == 1 }, patience, 5*time.Millisecond)
	now, err := os.Lstat(registrar)
	require.NoError(t, err)
	assert.True(t, os.SameFile(socket, now), "a restart of kubelet needs no new socket")

	assert.NoError(t, f.stop())
	assert.NoFileExists(t, registrar)
	assert.NoFileExists(t, plugin)
	assert.Equal(t, 0.0, testutil.ToFloat64(f.metrics.registered))
}

func TestRegistrationGivesUp(t *testing.T) {
	f := newFixture(t, fakeClaims{}, func(c *Config) { c.Timeout = 20 * time.Millisecond })
	f.start()
	state := f.waitState("gave up", func(s State) bool { return s.GaveUp })
	assert.Equal(t, 3, state.Attempts)
	assert.False(t, state.Registered)
	assert.ErrorContains(t, state.RegistrationError, "kubelet did not answer within 20ms")

	err := <-f.done
	f.done <- err
	require.ErrorContains(t, err, "not registered with kubelet after 3 attempts")
	registrar, plugin := f.config.socketPaths()
	assert.NoFileExists(t, registrar)
	assert.NoFileExists(t, plugin)
	assert.Equal(t, 3.0, testutil.ToFloat64(f.metrics.registrations.WithLabelValues("error")))
	assert.Equal(t, 3, f.log.Count("Registration with kubelet failed", "maxAttempts=3"))
	slices, err := f.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
	require.NoError(t, err)
	assert.Empty(t, slices.Items, "nothing is offered that cannot be prepared")

	// Kubelet is back when the driver is started again.
	<-f.done
	f.config.Timeout, f.config.MaxAttempts = 500*time.Millisecond, 100
	f.start()
	state = f.waitState("another failure", func(s State) bool { return s.Attempts == 2 })
	assert.True(t, state.GaveUp, "as long as it is not registered")
	f.kubelet(nil, accepted)
	state = f.waitState("registered", registered)
	assert.False(t, state.GaveUp)
}

func TestRegistrationRefusedThenAccepted(t *testing.T) {
	f := newFixture(t, fakeClaims{}, func(c *Config) { c.Timeout = 500 * time.Millisecond; c.MaxAttempts = 100 })
	f.start()
	first := f.kubelet(nil, refused)
	state := f.waitState("refusal", func(s State) bool { return s.RegistrationError != nil })
	assert.ErrorContains(t, state.RegistrationError, `kubelet refused the driver: "no such plugin type"`)
	f.kubelet(first, accepted)
	state = f.waitState("registered", registered)
	assert.NoError(t, state.RegistrationError)
	assert.Zero(t, state.Attempts)
}

func TestLostSocketIsReplaced(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	f.start()
	socket := f.kubelet(nil, accepted)
	f.waitState("registered", registered)
	registrar, plugin := f.config.socketPaths()

	require.NoError(t, os.Remove(registrar))
	state := f.waitState("loss", func(s State) bool { return !s.Registered })
	assert.ErrorContains(t, state.RegistrationError, "was removed")
	socket = f.kubelet(socket, accepted)
	f.waitState("registered again", registered)

	// Another process puts its own file in the place of the other socket.
	require.NoError(t, os.WriteFile(plugin+".new", nil, 0o600))
	require.NoError(t, os.Rename(plugin+".new", plugin))
	state = f.waitState("loss", func(s State) bool { return !s.Registered })
	assert.ErrorContains(t, state.RegistrationError, "was replaced")
	socket = f.kubelet(socket, accepted)
	f.waitState("registered once more", registered)

	// Kubelet, started anew, does not want the driver any more.
	require.NoError(t, register(registrar, refused))
	f.waitState("loss", func(s State) bool { return !s.Registered })
	f.kubelet(socket, accepted)
	f.waitState("registered after all", registered)
	assert.NoError(t, f.stop())
}

func TestSocketPathTooLong(t *testing.T) {
	f := newFixture(t, fakeClaims{}, func(c *Config) { c.KubeletRootDir = filepath.Join("/", strings.Repeat("d", 80)) })
	err := f.Run(context.Background())
	assert.ErrorContains(t, err, "at most 107 are allowed")
}

func TestClaimsInParallel(t *testing.T) {
	var running, most atomic.Int32
	release := make(chan struct{})
	p := newKubeletPlugin(nil, "", fakeClaims{prepare: func(context.Context, *resourceapi.ResourceClaim) (claims.Result, error) {
		n := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		<-release
		return claims.Result{}, nil
	}}, nil, noMetadata{}, fakeRuntime{})
	var cs []*resourceapi.ResourceClaim
	for i := range 3 * maxClaims {
		cs = append(cs, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{UID: kubetypes.UID(fmt.Sprint(i))}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan map[kubetypes.UID]kubeletplugin.PrepareResult)
	go func() {
		results, err := p.PrepareResourceClaims(ctx, cs)
		assert.NoError(t, err)
		done <- results
	}()
	require.Eventually(t, func() bool { return running.Load() == maxClaims }, patience, time.Millisecond)
	cancel()
	// All that wait for a slot are refused before the first slot is free.
	require.Eventually(t, func() bool { return len(p.slots) == maxClaims }, patience, time.Millisecond)
	close(release)
	results := <-done
	assert.Len(t, results, len(cs), "kubelet gets a result for every claim")
	assert.LessOrEqual(t, most.Load(), int32(maxClaims))

	results, err := p.PrepareResourceClaims(context.Background(), cs)
	require.NoError(t, err)
	for uid, result := range results {
		assert.NoError(t, result.Err, "claim %s", uid)
	}
	assert.ErrorIs(t, p.WatchHealthStatus(ctx, nil), kubeletplugin.ErrHealthNotSupported)
}

// Claims that wait for devices leave the slots to the claims that have to give those back.
func TestAwaitingTakesNoSlot(t *testing.T) {
	var waiting atomic.Int32
	freed := make(chan struct{})
	p := newKubeletPlugin(nil, "", fakeClaims{
		await:     func(context.Context, *resourceapi.ResourceClaim) { waiting.Add(1); <-freed },
		unprepare: func(context.Context, kubetypes.UID) error { close(freed); return nil },
	}, nil, noMetadata{}, fakeRuntime{})
	var cs []*resourceapi.ResourceClaim
	for i := range 2 * maxClaims {
		cs = append(cs, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{UID: kubetypes.UID(fmt.Sprint(i))}})
	}
	done := make(chan map[kubetypes.UID]kubeletplugin.PrepareResult)
	go func() {
		results, err := p.PrepareResourceClaims(t.Context(), cs)
		assert.NoError(t, err)
		done <- results
	}()
	require.Eventually(t, func() bool { return waiting.Load() == 2*maxClaims }, patience, time.Millisecond)
	_, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: "holder"}})
	require.NoError(t, err)
	assert.Len(t, <-done, len(cs))
}

// A pod whose claim is prepared starts, and with the runtime away nobody would move its devices into it.
func TestPrepareNeedsTheRuntime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const reason = "NRI socket /run/nri.sock does not exist: enable NRI in the container runtime"
		p := newKubeletPlugin(nil, "", fakeClaims{prepare: func(context.Context, *resourceapi.ResourceClaim) (claims.Result, error) {
			t.Error("prepared without the runtime")
			return claims.Result{}, nil
		}}, nil, noMetadata{}, fakeRuntime{away: reason})
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "uid"}}
		start := time.Now()
		results, err := p.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
		require.NoError(t, err)
		require.ErrorContains(t, results["uid"].Err, "prepare claim default/c: ")
		require.ErrorContains(t, results["uid"].Err, reason)
		require.Equal(t, runtimePatience, time.Since(start))

		unprepared, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: "uid"}})
		require.NoError(t, err)
		require.NoError(t, unprepared["uid"], "devices come back without the runtime")
	})
}

// Kubelet keeps all claims of a call when one of them cannot be unprepared, or when it has given the call up.
func TestUnpreparedAllOrNone(t *testing.T) {
	var answered []kubetypes.UID
	var failure error
	ctx, cancel := context.WithCancel(t.Context())
	p := newKubeletPlugin(nil, "", fakeClaims{
		unprepare: func(_ context.Context, claim kubetypes.UID) error {
			if claim == "b" {
				return failure
			}
			return nil
		},
		answered: func(claims []kubetypes.UID) { answered = append(answered, claims...) },
	}, nil, noMetadata{}, fakeRuntime{})
	both := []kubeletplugin.NamespacedObject{{UID: "a"}, {UID: "b"}}
	answer := func() {
		errs, err := p.UnprepareResourceClaims(ctx, both)
		require.NoError(t, err)
		response := &drapb.NodeUnprepareResourcesResponse{Claims: map[string]*drapb.NodeUnprepareResourceResponse{}}
		for uid, err := range errs {
			response.Claims[string(uid)] = &drapb.NodeUnprepareResourceResponse{}
			if err != nil {
				response.Claims[string(uid)].Error = err.Error()
			}
		}
		p.answered(ctx, response)
	}
	failure = errors.New("busy")
	answer()
	require.Empty(t, answered)

	failure = nil
	answer()
	require.ElementsMatch(t, []kubetypes.UID{"a", "b"}, answered)

	cancel()
	answered = nil
	answer()
	require.Empty(t, answered)
}

// unwritten has no files of the claims that it names.
type unwritten struct {
	noMetadata
	claims map[string]string
}

func (u unwritten) Check(claim tables.ClaimRef, ids []string) error {
	if reason := u.claims[claim.Name]; reason != "" {
		return fmt.Errorf("%s: %v", reason, ids)
	}
	return nil
}

// A claim whose pod would read nothing, or something else than is so, is not prepared; those beside it are.
func TestPrepareNeedsTheMetadata(t *testing.T) {
	var redescribed []kubetypes.UID
	p := newKubeletPlugin(nil, "", fakeClaims{redescribe: func(claim kubetypes.UID) error {
		redescribed = append(redescribed, claim)
		if claim == "late-uid" {
			return errors.New("no space left on device")
		}
		return nil
	}}, nil, unwritten{claims: map[string]string{"full": "no space left on device"}}, fakeRuntime{})
	answer := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
	var cs []*drapb.Claim
	for _, name := range []string{"good", "full", "late", "bad", "unasked"} {
		cs = append(cs, &drapb.Claim{Namespace: "default", Name: name, Uid: name + "-uid"})
		answer.Claims[name+"-uid"] = &drapb.NodePrepareResourceResponse{Devices: []*drapb.Device{{CdiDeviceIds: []string{"id-of-" + name}}}}
	}
	answer.Claims["bad-uid"] = &drapb.NodePrepareResourceResponse{Error: "vlan: 5000 is not in 0..4094"}
	delete(answer.Claims, "unasked-uid")

	p.described(t.Context(), cs, answer)
	require.Len(t, answer.Claims["good-uid"].Devices, 1)
	require.Empty(t, answer.Claims["good-uid"].Error)
	require.Equal(t, "prepare claim default/full: no space left on device: [id-of-full]", answer.Claims["full-uid"].Error)
	require.Empty(t, answer.Claims["full-uid"].Devices)
	require.Equal(t, "prepare claim default/late: no space left on device", answer.Claims["late-uid"].Error)
	require.Equal(t, "vlan: 5000 is not in 0..4094", answer.Claims["bad-uid"].Error)
	require.Equal(t, []kubetypes.UID{"good-uid", "late-uid"}, redescribed)
}
