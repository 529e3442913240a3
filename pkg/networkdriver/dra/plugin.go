// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// maxClaims is how many claims are worked on at once. Each is a few netlink and apiserver requests.
const maxClaims = 8

// runtimePatience is how long Prepare waits for the container runtime: longer than that takes to restart, and with the
// wait for a device's former holder still within the 45 seconds that kubelet gives a call.
const runtimePatience = 30 * time.Second

// Claims prepares claims and takes them back. Calls for different claims run at the same time.
type Claims interface {
	// AwaitDevices waits, not for long, until nobody else holds the claim's devices.
	AwaitDevices(ctx context.Context, claim *resourceapi.ResourceClaim)
	// Prepare sets up the claim's devices. It is idempotent; the error is shown in the pod's event.
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (claims.Result, error)
	// Unprepare gives the claim's devices back. A claim that is not prepared is no error.
	Unprepare(ctx context.Context, claim kubetypes.UID) error
	// Redescribe makes what the claim's pods read about its devices what it should be, after it was written anew.
	Redescribe(ctx context.Context, claim kubetypes.UID) error
	// Unprepared says that kubelet is being told that all claims that it has asked for are unprepared.
	Unprepared(claims []kubetypes.UID)
}

// Runtime is the container runtime, which tells of the pods that prepared devices are moved into.
type Runtime interface {
	// WaitConnected returns when the runtime is connected. If the context ends before, the error says why it is not, and
	// what to do.
	WaitConnected(ctx context.Context) error
}

// Metadata is what pods read about their devices, in files that come with kubelet's answers; [metadata.Files] is the one.
type Metadata interface {
	// Options have kubeletplugin write and remove the files.
	Options() []kubeletplugin.Option
	// Complete adds to a claim's prepared devices what the files are to say.
	Complete(claim kubetypes.UID, devices []kubeletplugin.Device)
	// Check says why there are no files for a claim with these CDI devices, nil if there are.
	Check(claim tables.ClaimRef, ids []string) error
}

// kubeletPlugin answers kubelet's calls.
type kubeletPlugin struct {
	log      *slog.Logger
	driver   string
	claims   Claims
	reporter *reporter
	metadata Metadata
	runtime  Runtime
	// slots has room for the claims that are worked on.
	slots chan struct{}
	// failed takes the error of a gRPC server that ended by itself.
	failed chan error
}

var _ kubeletplugin.DRAPlugin = &kubeletPlugin{}

func newKubeletPlugin(log *slog.Logger, driver string, claims Claims, reporter *reporter, metadata Metadata, runtime Runtime) *kubeletPlugin {
	return &kubeletPlugin{
		log: log, driver: driver, claims: claims, reporter: reporter, metadata: metadata, runtime: runtime, slots: make(chan struct{}, maxClaims), failed: make(chan error, 1),
	}
}

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (p *kubeletPlugin) PrepareResourceClaims(ctx context.Context, cs []*resourceapi.ResourceClaim) (map[kubetypes.UID]kubeletplugin.PrepareResult, error) {
	prepare := func(claim *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
		result, err := p.claims.Prepare(ctx, claim)
		if err != nil {
			return kubeletplugin.PrepareResult{Err: err}
		}
		devices := make([]kubeletplugin.Device, len(result.Devices))
		for i, d := range result.Devices {
			devices[i] = kubeletplugin.Device{
				Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Device,
				CDIDeviceIDs: []string{cdi.ID(p.driver, claim.UID, d.Request)},
			}
		}
		return kubeletplugin.PrepareResult{Devices: devices}
	}
	// This wait takes no slot: what it waits for may be an Unprepare that needs one.
	await := func(claim *resourceapi.ResourceClaim) error {
		if err := p.awaitRuntime(ctx); err != nil {
			return fmt.Errorf("prepare claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		p.claims.AwaitDevices(ctx, claim)
		return nil
	}
	results := each(ctx, p.slots, cs, func(c *resourceapi.ResourceClaim) kubetypes.UID { return c.UID }, await, prepare,
		func(err error) kubeletplugin.PrepareResult { return kubeletplugin.PrepareResult{Err: err} })
	for claim, result := range results {
		p.metadata.Complete(claim, result.Devices)
	}
	return results, nil
}

// described fails the claims in kubelet's answer whose files could not be written, which kubeletplugin only logs. Of the others the
// files are put right again: a sandbox may have got the devices after kubeletplugin was told what to write.
func (p *kubeletPlugin) described(ctx context.Context, cs []*drapb.Claim, answer *drapb.NodePrepareResourcesResponse) {
	for _, c := range cs {
		prepared := answer.GetClaims()[c.Uid]
		if prepared == nil || prepared.Error != "" {
			continue
		}
		var ids []string
		for _, d := range prepared.Devices {
			ids = append(ids, d.CdiDeviceIds...)
		}
		claim := tables.ClaimRef{Namespace: c.Namespace, Name: c.Name, UID: kubetypes.UID(c.Uid)}
		err := p.metadata.Check(claim, ids)
		if err == nil {
			err = p.claims.Redescribe(ctx, claim.UID)
		}
		if err != nil {
			answer.Claims[c.Uid] = &drapb.NodePrepareResourceResponse{Error: fmt.Sprintf("prepare claim %s: %v", claim, err)}
		}
	}
}

// answered is told what kubelet is being told: all claims are unprepared, or none is.
func (p *kubeletPlugin) answered(ctx context.Context, answer *drapb.NodeUnprepareResourcesResponse) {
	var claims []kubetypes.UID
	for uid, c := range answer.GetClaims() {
		if c.GetError() != "" {
			return
		}
		claims = append(claims, kubetypes.UID(uid))
	}
	if ctx.Err() == nil {
		p.claims.Unprepared(claims)
	}
}

// awaitRuntime waits, not for long, for the runtime: kubelet starts the pod once its claims are prepared, and with the
// runtime away nobody would move the devices into it.
func (p *kubeletPlugin) awaitRuntime(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, runtimePatience)
	defer cancel()
	if err := p.runtime.WaitConnected(ctx); err != nil {
		return fmt.Errorf("the pod would start without its devices: %w", err)
	}
	return nil
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (p *kubeletPlugin) UnprepareResourceClaims(ctx context.Context, cs []kubeletplugin.NamespacedObject) (map[kubetypes.UID]error, error) {
	return each(ctx, p.slots, cs, func(c kubeletplugin.NamespacedObject) kubetypes.UID { return c.UID },
		func(kubeletplugin.NamespacedObject) error { return nil },
		func(c kubeletplugin.NamespacedObject) error { return p.claims.Unprepare(ctx, c.UID) },
		func(err error) error { return err }), nil
}

// each awaits what the work on each claim needs and then does it, for as many claims at once as there are slots. A claim
// that waits in vain, or gets no slot before the context ends, has the result of refuse.
func each[C, R any](ctx context.Context, slots chan struct{}, cs []C, uid func(C) kubetypes.UID,
	await func(C) error, work func(C) R, refuse func(error) R) map[kubetypes.UID]R {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards results
	results := make(map[kubetypes.UID]R, len(cs))
	for _, c := range cs {
		wg.Go(func() {
			var result R
			if err := await(c); err != nil {
				result = refuse(err)
			} else {
				select {
				case slots <- struct{}{}:
					result = work(c)
					<-slots
				case <-ctx.Done():
					result = refuse(fmt.Errorf("waiting for other claims: %w", ctx.Err()))
				}
			}
			mu.Lock()
			results[uid(c)] = result
			mu.Unlock()
		})
	}
	wg.Wait()
	return results
}

// HandleError implements [kubeletplugin.DRAPlugin]. It hears of gRPC servers that ended by themselves, which is mended
// by new ones, and of reports of health that do not come; publication has its own handler.
func (p *kubeletPlugin) HandleError(_ context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		p.log.Warn("Kubelet does not hear how devices are", slog.String("error", fmt.Sprintf("%s: %v", msg, err)))
		return
	}
	p.log.Error("Kubelet plugin server failed", slog.String("error", fmt.Sprintf("%s: %v", msg, err)))
	select {
	case p.failed <- fmt.Errorf("%s: %w", msg, err):
	default:
	}
}

// WatchHealthStatus implements [kubeletplugin.DRAPlugin].
func (p *kubeletPlugin) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	if p.reporter == nil {
		return kubeletplugin.ErrHealthNotSupported
	}
	p.reporter.run(ctx, reports)
	return nil
}
