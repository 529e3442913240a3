// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// world is what the room reaches outside. The claims' status and reader are the real ones.
type world struct {
	*agent
	attachments.StatusWriter
	attachments.ClaimReader
}

var _ attachments.World = &world{}

var errKernel = errors.New("injected: the kernel does not do it now")

// kernelTime is how long the kernel takes, seldom long enough for hooks to give up.
func (w *world) kernelTime() span { return span{100 * time.Microsecond, 10 * time.Millisecond} }

// ask has the kernel do something. A call to the kernel cannot be given up, and does nothing for a context that has ended.
func (w *world) ask(ctx context.Context, what string, ready func() bool, work func() error) error {
	s := w.sim
	var err error
	s.do(&call{process: w.process, key: actorOf(ctx) + ": " + what, takes: w.kernelTime(), ready: ready, effect: func() {
		switch {
		case ctx.Err() != nil:
			err = ctx.Err()
		case s.chance(s.faults.kernel):
			err = errKernel
		default:
			err = work()
		}
		if err != nil {
			s.note("  %v", err)
		}
	}})
	// Now and then the kernel takes long, which is drawn with the call's place in the order.
	long := false
	s.do(&call{process: w.process, key: actorOf(ctx) + ": done: " + what, effect: func() { long = s.chance(s.faults.slow) }})
	if long {
		s.sleep(w.process, actorOf(ctx)+": slow: "+what, span{100 * time.Millisecond, 3 * time.Second}, nil)
	}
	return err
}

func (w *world) HostIndex(ctx context.Context, dev types.Device) (index int, err error) {
	err = w.ask(ctx, "which link "+dev.IfName()+" has", nil, func() error {
		index = w.sim.kernel.hostIndex(dev)
		return nil
	})
	return index, err
}

func (w *world) Attach(ctx context.Context, netns string, dev types.Device, link int, config types.DeviceConfig) (found *types.Attachment, err error) {
	err = w.ask(ctx, "attach "+dev.IfName()+" to "+netns, nil, func() (err error) {
		if w.sim.mutant.anyLink {
			link = w.sim.kernel.hostIndex(dev)
		}
		found, err = w.sim.kernel.attach(actorOf(ctx), netns, dev, link, config)
		return err
	})
	return found, err
}

func (w *world) Detach(ctx context.Context, netns string, dev types.Device) error {
	if w.sim.mutant.returnFirst {
		for row := range w.allocations.List(w.db.ReadTxn(), tables.AllocationsByDevice(dev.IfName())) {
			if row.Releasing {
				w.keeper.Return(ctx, row)
			}
		}
	}
	return w.ask(ctx, "detach "+dev.IfName(), func() bool { return w.sim.kernel.vf(dev.IfName()).netns != limbo }, func() error {
		return w.sim.kernel.detach(dev)
	})
}

// Of networks the VLAN and the addresses are simulated.
func (w *world) Tidy(string, types.DeviceConfig) error                        { return nil }
func (w *world) Announce(*types.Attachment, types.DeviceConfig)               {}
func (w *world) Of(*tables.DRADevice, iter.Seq[*tables.DRAAllocation]) string { return poolName }
func (w *world) ClaimParameters(string) (string, bool)                        { return v2alpha1.ClaimsAny, true }

func (w *world) Take(ctx context.Context, row *tables.DRAAllocation, note func(*tables.DRAAllocation) error) (*tables.DRAAllocation, error) {
	return w.sim.mutant.take(ctx, w.keeper, row, note)
}

func (w *world) Return(ctx context.Context, row *tables.DRAAllocation) { w.keeper.Return(ctx, row) }

func (w *world) ReturnLeft(claim kubetypes.UID) { w.keeper.ReturnLeft(claim) }

func (w *world) Where(ctx context.Context, netns string, dev types.Device) (seen podnet.Sighting, err error) {
	err = w.ask(ctx, "where is "+dev.IfName()+", "+netns, nil, func() error {
		seen = w.sim.kernel.where(netns, dev)
		w.sim.note("  %d %s", seen.Place, seen.Why)
		return nil
	})
	return seen, err
}

func (w *world) CheckNetNS(netns string) (err error) {
	if netns == "" {
		return errors.New("the pod runs on the host network")
	}
	w.sim.do(&call{process: w.process, key: "check " + netns, effect: func() { err = w.sim.kernel.checkNetNS(netns) }})
	return err
}

func (w *world) Validate(dev types.Device, config types.DeviceConfig) error { return nil }

func (w *world) Remember(ctx context.Context, dev types.Device, config types.DeviceConfig) (found types.Device, err error) {
	err = w.ask(ctx, "remember "+dev.IfName(), nil, func() error {
		d, err := w.sim.kernel.remember(dev, config)
		if err == nil {
			found = d
		}
		return err
	})
	return found, err
}

func (w *world) Setup(ctx context.Context, dev types.Device, config types.DeviceConfig) (prepared types.Device, err error) {
	err = w.ask(ctx, fmt.Sprintf("set up %s in VLAN %d", dev.IfName(), config.VLAN()), nil, func() (err error) {
		prepared, err = w.sim.kernel.setup(actorOf(ctx), dev, config)
		return err
	})
	if err == nil && config.Driver != "" {
		err = w.bindAway(ctx, prepared.(*device), config.Driver)
	}
	if err != nil {
		return nil, err
	}
	return prepared, nil
}

func (w *world) Free(ctx context.Context, dev types.Device, _ types.DeviceConfig) error {
	home, err := dev, error(nil)
	if !w.sim.mutant.keepDriver {
		home, err = w.bindBack(ctx, dev.(*device))
	}
	if err == nil && home != dev {
		err = w.Detach(ctx, "", home)
	}
	if err != nil {
		return err
	}
	return w.ask(ctx, "free "+dev.IfName(), nil, func() error {
		delete(w.away, dev.IfName())
		return w.sim.kernel.free(home)
	})
}

func (w *world) Check(ctx context.Context, rows []*tables.DRAAllocation) []error {
	errs := make([]error, len(rows))
	var names []string
	for _, row := range rows {
		names = append(names, row.DeviceName)
	}
	err := w.ask(ctx, "check "+strings.Join(names, ","), nil, func() error {
		for i, row := range rows {
			if errs[i] = w.sim.kernel.check(actorOf(ctx), row); errs[i] != nil {
				w.sim.note("  %s: %v", row.DeviceName, errs[i])
			}
		}
		if w.sim.chance(w.sim.faults.remade) {
			w.sim.remakeVFs(span{time.Microsecond, 10 * time.Millisecond})
		}
		return nil
	})
	for i := range errs {
		if err != nil {
			errs[i] = err
		}
		if w.sim.mutant.blind {
			errs[i] = nil
		}
	}
	return errs
}

// file has a file of the node changed, which fails on a full disk.
func (w *world) file(what string, work func() error) (err error) {
	s := w.sim
	s.do(&call{process: w.process, key: what, takes: span{10 * time.Microsecond, time.Millisecond}, effect: func() {
		if s.chance(s.faults.disk) {
			err = fmt.Errorf("injected: %w", syscall.ENOSPC)
		} else {
			err = work()
		}
		if err != nil {
			s.note("  %v", err)
		}
	}})
	return err
}

func (w *world) OpenGate(g cdi.Gate) error {
	return w.file("open the gate of "+string(g.Claim)+" for "+g.Sandbox, func() error { return w.gate.OpenGate(g) })
}

func (w *world) CloseGate(claim kubetypes.UID) {
	w.sim.do(&call{process: w.process, key: "close the gate of " + string(claim), effect: func() {
		if !w.sim.mutant.openGates {
			w.gate.CloseGate(claim)
		}
	}})
}

func (w *world) WasOpened(claim kubetypes.UID, sandbox string) bool {
	return w.gate.WasOpened(claim, sandbox)
}

func (w *world) CloseOtherGates(claims []kubetypes.UID) {
	w.sim.do(&call{process: w.process, key: fmt.Sprint("close gates but ", claims), effect: func() { w.gate.CloseOtherGates(claims) }})
}

func (w *world) ReadMarkers(environment, devices []string) []cdi.Marker {
	return w.gate.ReadMarkers(environment, devices)
}

func (w *world) Describe(rows []*tables.DRAAllocation) error {
	return w.file("describe claim "+rows[0].ClaimName, func() error {
		if w.sim.mutant.undescribed {
			return nil
		}
		return w.metadata.Describe(rows)
	})
}

func (w *world) Undescribe(claim tables.ClaimRef) {
	w.sim.do(&call{process: w.process, key: "undescribe claim " + claim.Name, effect: func() {
		if !w.sim.mutant.keepFiles {
			w.metadata.Undescribe(claim)
		}
	}})
}

func (w *world) UndescribeOthers(claims []tables.ClaimRef) {
	w.sim.do(&call{process: w.process, key: "undescribe others", effect: func() {
		if !w.sim.mutant.keepFiles {
			w.metadata.UndescribeOthers(claims)
		}
	}})
}

func (w *world) Note(row *tables.DRAAllocation, settled bool) error {
	return w.file(fmt.Sprintf("note %s for claim %s, settled %v", row.DeviceName, row.ClaimName, settled), func() error {
		if w.sim.mutant.forgetful {
			return nil
		}
		return w.journal.Note(row, settled)
	})
}

func (w *world) Forget(row *tables.DRAAllocation) error {
	return w.file(fmt.Sprintf("forget %s of claim %s", row.DeviceName, row.ClaimName), func() error { return w.journal.Forget(row) })
}

func (w *world) OweClaim(claim tables.ClaimRef) (err error) {
	// A disk that is full just then, and an agent that ends before it has made up for it, is more than the driver bears.
	w.sim.do(&call{process: w.process, key: "owe " + claim.Name, effect: func() {
		if !w.sim.mutant.oweNothing {
			err = w.journal.OweClaim(claim)
		}
	}})
	return err
}

func (w *world) SettleClaim(claim kubetypes.UID) error {
	if !slices.ContainsFunc(w.journal.OwedClaims(), func(c tables.ClaimRef) bool { return c.UID == claim }) {
		return nil
	}
	return w.file("settle "+string(claim), func() error { return w.journal.SettleClaim(claim) })
}

func (w *world) OwedClaims() []tables.ClaimRef { return w.journal.OwedClaims() }

func (w *world) Warn(sb attachments.Sandbox, reason, message string) {
	w.sim.log("event for %s: %s: %s", sb.PodName, reason, message)
}

func (w *world) Now() time.Time { return time.Now() }

func (w *world) WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, limit)
}

// logHandler puts what the driver logs into the trace.
type logHandler struct {
	sim     *sim
	process *process
	attrs   string
}

func (h *logHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo && !h.process.dead
}

func (h *logHandler) Handle(_ context.Context, record slog.Record) error {
	var b strings.Builder
	b.WriteString(record.Message + h.attrs)
	record.Attrs(func(a slog.Attr) bool {
		b.WriteString(" " + a.String())
		return true
	})
	h.sim.log("%s", b.String())
	return nil
}

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *h
	for _, a := range attrs {
		with.attrs += " " + a.String()
	}
	return &with
}

func (h *logHandler) WithGroup(string) slog.Handler { return h }

// log adds to the trace what the driver says. It comes from goroutines that run side by side.
func (s *sim) log(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = append(s.said, strings.ReplaceAll(fmt.Sprintf(format, args...), s.dir, ""))
}

// restoredJournal has the changes that are made at a restart take place in steps.
type restoredJournal struct {
	*journal.Journal
	world *world
}

func (j restoredJournal) Note(row *tables.DRAAllocation, settled bool) error {
	return j.world.Note(row, settled)
}

func (j restoredJournal) Forget(row *tables.DRAAllocation) error { return j.world.Forget(row) }
