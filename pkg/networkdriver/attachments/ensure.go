// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// drifted begins the errors of devices that are not what Setup made of them and cannot be set up again.
const drifted = "set the device up again, since "

// secure is [Room.ensure] for links that are about to be moved. Which links those are is noted first: a VF that is made anew after it
// was looked at has another one, outside its VLAN, which is not moved in its place.
func (r *Room) secure(ctx context.Context, moves []*move) {
	for _, m := range moves {
		if id := m.now.PreparedDevice.Link(); id.IsZero() || !id.Physical() {
			continue
		}
		if m.link, m.err = r.world.HostIndex(ctx, m.now.PreparedDevice); m.err != nil {
			m.err = fmt.Errorf("look for the link on the host: %w", m.err)
		}
	}
	r.ensure(ctx, moves)
}

// ensure asks the kernel whether the devices are what Setup made of them, and sets up again what is not. What is being
// released is not set up any more. What fails is the move's error.
func (r *Room) ensure(ctx context.Context, moves []*move) {
	var rows []*tables.DRAAllocation
	var of []*move
	for _, m := range moves {
		if !m.row.Releasing {
			rows, of = append(rows, m.now), append(of, m)
		}
	}
	if len(rows) == 0 {
		return
	}
	for i, drift := range r.world.Check(ctx, rows) {
		if drift != nil {
			r.mend(ctx, of[i], drift)
		}
	}
}

func (r *Room) mend(ctx context.Context, m *move, drift error) {
	if err := r.setUpAgain(ctx, m); err != nil {
		m.err = stage.In("setup", fmt.Errorf(drifted+"%w: %w", drift, err))
		_, m.astray = errors.AsType[types.AstrayError](drift)
		return
	}
	r.log.Warn("Device was not as its claim has it and was set up again", "device", m.row.DeviceName, "claim", m.row.Claim(),
		"pod", m.row.Pod(), "vlan", m.row.Config.VLAN(), "reason", drift)
}

// expel takes a device that is in its pod out of it if it sends into a network that is not its claim's and cannot be put right. It
// comes back into the pod when it could be.
func (r *Room) expel(ctx context.Context, m *move) {
	if !m.astray || m.now.Attachment == nil {
		return
	}
	if m.now.PreparedDevice.Link().IsZero() {
		// A program of the pod has the device itself.
		r.world.CloseGate(m.row.ClaimUID)
		m.err = fmt.Errorf("%w; the device has no interface that could be taken out of the pod: delete the pod", m.err)
		if m.row.Error != m.err.Error() {
			r.world.Warn(podOf(m.row), ReasonAstray, describe(m.row)+": its frames go astray: "+m.err.Error())
		}
		return
	}
	ctx, cancel := r.world.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := r.detach(ctx, m.now.Attachment.NetNS, m.now); err != nil {
		m.err = fmt.Errorf("%w; and it could not be taken out of the pod: %w", m.err, err)
		return
	}
	m.now.LostFrom, m.now.Attachment = m.now.Attachment.SandboxID, nil
	r.log.Error("Device is taken out of its pod, since its frames would go astray", "device", m.row.DeviceName,
		"claim", m.row.Claim(), "pod", m.row.Pod(), "error", m.err)
	r.world.Warn(podOf(m.row), ReasonExpelled, describe(m.row)+" is taken out of the pod, since its frames would go astray: "+m.err.Error())
}

// podOf names the row's pod, of whose sandbox nothing is said.
func podOf(row *tables.DRAAllocation) Sandbox {
	return Sandbox{PodUID: row.PodUID, PodNamespace: row.ClaimNamespace, PodName: row.PodName}
}

// Ensure makes the kernel agree with the rows again after somebody else has changed something: a VLAN on the PF is put
// back, the link of a VF that was made anew goes into the living sandbox that its pod has, and what cannot be mended stands
// in the row. It is to be called every few seconds; where nothing has changed it only looks. sandboxesOf returns the
// sandboxes that a pod has.
func (r *Room) Ensure(ctx context.Context, sandboxesOf func(kubetypes.UID) []Sandbox) {
	for _, pod := range r.suspects(ctx) {
		if err := r.ensurePod(ctx, pod, sandboxesOf); err != nil {
			r.log.Debug("Pod's devices are not as they should be", "podUID", pod, "error", err)
		}
	}
}

// suspects returns the pods with a device that seems not to be as it should. It takes no locks, so that work on the pods
// does not wait.
func (r *Room) suspects(ctx context.Context) []kubetypes.UID {
	var rows []*tables.DRAAllocation
	for row := range r.table.All(r.db.ReadTxn()) {
		if !row.Releasing {
			rows = append(rows, row)
		}
	}
	if len(rows) == 0 {
		return nil
	}
	var pods []kubetypes.UID
	seen := map[kubetypes.UID]bool{}
	for i, drift := range r.world.Check(ctx, rows) {
		if row := rows[i]; !seen[row.PodUID] && (drift != nil || row.Error != "" || r.strayed(ctx, row) || r.ended(ctx, row)) {
			seen[row.PodUID] = true
			pods = append(pods, row.PodUID)
		}
	}
	return pods
}

// strayed says whether the device's link is not where the row says. Virtual links are not looked for: a pod that deletes
// one has no use for it.
func (r *Room) strayed(ctx context.Context, row *tables.DRAAllocation) bool {
	if link := row.PreparedDevice.Link(); row.Attachment == nil || link.IsZero() || !link.Physical() {
		return false
	}
	place := podnet.InPod
	if row.Attachment.Moved {
		place = podnet.Elsewhere
	}
	seen, err := r.world.Where(ctx, row.Attachment.NetNS, row.PreparedDevice)
	return err != nil || seen.Place != place
}

// ended says that the sandbox with the row's device has ended: its namespace is gone, and the link with it, or it is on the host.
// containerd tells plugins nothing of the end of sandboxes that it had before it was started again. A link in a third
// namespace does not count: it may be the sandbox's, whose path merely cannot be seen.
func (r *Room) ended(ctx context.Context, row *tables.DRAAllocation) bool {
	if row.Attachment == nil || r.world.CheckNetNS(row.Attachment.NetNS) == nil {
		return false
	}
	seen, err := r.world.Where(ctx, row.Attachment.NetNS, row.PreparedDevice)
	return err == nil && (seen.Place == podnet.OnHost || seen.Place == podnet.Gone)
}

func (r *Room) ensurePod(ctx context.Context, pod kubetypes.UID, sandboxesOf func(kubetypes.UID) []Sandbox) error {
	ctx, cancel := r.world.WithTimeout(ctx, syncPodTimeout)
	defer cancel()
	rows, unlock, err := r.lockPod(ctx, pod)
	if err != nil {
		return err
	}
	defer unlock()
	// Asked for with the locks held: a sandbox that was stopped meanwhile must not get its devices back.
	known := sandboxesOf(pod)
	var living []Sandbox
	for _, s := range known {
		if r.world.CheckNetNS(s.NetNS) == nil {
			living = append(living, s)
		}
	}
	// A link that could not be brought home when its sandbox ended, or of whose end nobody told, is brought home now.
	left := slices.ContainsFunc(rows, func(row *tables.DRAAllocation) bool {
		return row.Attachment != nil && row.Error != "" && !slices.ContainsFunc(known, func(s Sandbox) bool { return attachedTo(row, s.ID) }) ||
			r.ended(ctx, row)
	})
	if len(living) > 0 || left {
		return r.settle(ctx, rows, living)
	}
	// Nothing is to be moved, and what the rows say of the last move stays.
	var moves []*move
	for _, row := range rows {
		m := begin(row)
		if !strings.HasPrefix(row.Error, drifted) {
			m.now.Error = row.Error
		}
		moves = append(moves, m)
	}
	r.ensure(ctx, moves)
	var errs []error
	for _, m := range moves {
		if m.err != nil {
			r.log.Log(ctx, m.level(slog.LevelError), "Device is not as its claim has it", "device", m.row.DeviceName,
				"claim", m.row.Claim(), "pod", m.row.Pod(), "error", m.err)
		}
		errs = append(errs, m.err)
	}
	r.commit(moves)
	return errors.Join(errs...)
}
