// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Gate holds back the containers that list a claim while its devices are not in a sandbox; [cdi.Files] is the one.
type Gate interface {
	// OpenGate lets containers start that list one of the claim's requests and are in the sandbox, and has them marked with it.
	OpenGate(cdi.Gate) error
	// CloseGate holds them back, now or as soon as that is possible.
	CloseGate(claim kubetypes.UID)
	// WasOpened says whether the gate is open for the sandbox, by whichever life of the agent.
	WasOpened(claim kubetypes.UID, sandbox string) bool
	// CloseOtherGates closes all gates but those of the claims.
	CloseOtherGates(claims []kubetypes.UID)
	// ReadMarkers returns what marks a container with this environment and these CDI devices.
	ReadMarkers(environment, devices []string) []cdi.Marker
}

// rowsOf returns the claim's rows as they are to be once moves are committed.
func (r *Room) rowsOf(claim kubetypes.UID, moves []*move) []*tables.DRAAllocation {
	rows := statedb.Collect(r.table.List(r.db.ReadTxn(), tables.AllocationsByClaim(claim)))
	for i, row := range rows {
		if j := slices.IndexFunc(moves, func(m *move) bool { return m.row.Pool == row.Pool && m.row.DeviceName == row.DeviceName }); j >= 0 {
			rows[i] = moves[j].now
		}
	}
	return rows
}

// openGates opens the gates of claims whose devices are all in the place once moves are committed. The claims' locks are needed.
func (r *Room) openGates(claims []kubetypes.UID, moves []*move, in *types.Attachment) error {
	for _, claim := range claims {
		gate, err := gateOf(claim, r.rowsOf(claim, moves), in)
		if err != nil {
			return err
		}
		if err := r.world.OpenGate(gate); err != nil {
			return fmt.Errorf("let containers use claim %s: %w", gate.ClaimName, err)
		}
	}
	return nil
}

// gateOf describes the gate of the claim with the rows once its devices are in the place, which is when their nodes are known.
func gateOf(claim kubetypes.UID, rows []*tables.DRAAllocation, in *types.Attachment) (cdi.Gate, error) {
	gate := cdi.Gate{Claim: claim, Sandbox: in.SandboxID, NetNS: in.NetNS}
	for _, row := range rows {
		gate.Requests = append(gate.Requests, row.Request)
		gate.ClaimName, gate.Pod = row.Claim(), row.Pod()
		e, err := types.ExposureOf(row.PreparedDevice, row.Config)
		if err != nil {
			return gate, fmt.Errorf("%s: %w", describe(row), err)
		}
		if e.Address != "" {
			gate.Exposed = append(gate.Exposed, cdi.Exposed{Request: row.Request, PodClaim: cmp.Or(row.PodClaim, row.ClaimName), Exposure: e})
		}
		// Of a device with several links it is not known which one is meant.
		if id := row.PreparedDevice.Link(); id.Device != "" && id.PermMAC == "" {
			gate.Hardware = append(gate.Hardware, gatehook.Device{Bus: id.Bus, Name: id.Device})
		}
	}
	return gate, nil
}

// describe has containers of the claims read what the rows say once moves are committed. It comes before the gates are opened, and needs
// the claims' locks.
func (r *Room) describe(claims []kubetypes.UID, moves []*move) error {
	for _, claim := range claims {
		rows := r.rowsOf(claim, moves)
		if len(rows) == 0 {
			continue // unprepared meanwhile
		}
		if err := r.world.Describe(rows); err != nil {
			return err
		}
	}
	return nil
}

// Redescribe has containers of a claim read where its devices are, after something else may have been written.
func (r *Room) Redescribe(ctx context.Context, uid kubetypes.UID) error {
	claim, err := r.Lock(ctx, uid)
	if err != nil {
		return err
	}
	defer claim.Unlock()
	return r.describe([]kubetypes.UID{uid}, nil)
}

// Undescribe is for a claim that is gone.
func (r *Room) Undescribe(claim tables.ClaimRef) { r.world.Undescribe(claim) }

// syncGates opens or closes the gates of the pod's claims by what the rows say, after what their containers read is put right. The
// claims' locks are needed.
func (r *Room) syncGates(pod kubetypes.UID) error {
	var failed error
	for _, claim := range claimsOf(r.rowsOfPod(pod)) {
		in := r.placeOf(claim)
		var gate cdi.Gate
		if in != nil {
			err := r.describe([]kubetypes.UID{claim}, nil)
			if err == nil {
				gate, err = gateOf(claim, r.rowsOf(claim, nil), in)
			}
			if err != nil {
				in, failed = nil, errors.Join(failed, err)
			}
		}
		if in != nil {
			_ = r.world.OpenGate(gate) // it is tried again by itself
		} else {
			r.world.CloseGate(claim)
		}
	}
	return failed
}

// placeOf returns an attachment to the one sandbox that all devices of the claim are in, to stay.
func (r *Room) placeOf(claim kubetypes.UID) (in *types.Attachment) {
	for row := range r.table.List(r.db.ReadTxn(), tables.AllocationsByClaim(claim)) {
		if row.Releasing || row.Attachment == nil || in != nil && row.Attachment.SandboxID != in.SandboxID {
			return nil
		}
		in = row.Attachment
	}
	return in
}

// Alive says whether the sandbox has a network namespace that devices can be attached to.
func (r *Room) Alive(s Sandbox) bool { return r.world.CheckNetNS(s.NetNS) == nil }

// Admit says why a container with this environment and these CDI devices must not start in the sandbox: it uses a claim
// whose devices are in another one. That is how a pod is recognised that shares the claim of another pod, since kubelet
// prepares a claim once.
func (r *Room) Admit(s Sandbox, environment, devices []string) error {
	for _, marker := range r.world.ReadMarkers(environment, devices) {
		rows := statedb.Collect(r.table.List(r.db.ReadTxn(), tables.AllocationsByClaim(marker.Claim)))
		if len(rows) == 0 && marker.Sandbox != s.ID {
			return fmt.Errorf("the claim with uid %s is not prepared, or not by this driver any more", marker.Claim)
		}
		for _, row := range rows {
			switch {
			case attachedTo(row, s.ID) && !row.Releasing:
			case row.PodUID == s.PodUID:
				return fmt.Errorf("%s is not in the sandbox yet", describe(row))
			default:
				err := InUse(row)
				r.world.Warn(s, ReasonClaimInUse, err.Error())
				return err
			}
		}
	}
	return nil
}

// LocksMemory says whether a program of a container with this environment opens a device itself. The memory that the device
// reaches is locked then, all that the program has for it.
func (r *Room) LocksMemory(environment []string) bool {
	for _, marker := range cdi.MarkersIn(environment) {
		for row := range r.table.List(r.db.ReadTxn(), tables.AllocationsByClaim(marker.Claim)) {
			if types.IsExposed(row.PreparedDevice, row.Config) {
				return true
			}
		}
	}
	return false
}

// InUse refuses a second pod of the row's claim.
func InUse(row *tables.DRAAllocation) error {
	return fmt.Errorf("claim %s is in use by pod %s (uid %s), which has device %s; a network device is in one pod at a time: "+
		"give each pod a claim of its own by a ResourceClaimTemplate, or have a Deployment end the old pod first (strategy Recreate)",
		row.Claim(), row.Pod(), row.PodUID, row.DeviceName)
}
