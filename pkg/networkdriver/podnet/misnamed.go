// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/networkdriver/pkg/nic"
)

// home is what a link is restored to on the host.
type home struct {
	device string // for people
	id     nic.Identity
	want   nic.State
	// index is the one that the link had when it left, 0 if that does not matter.
	index int
}

// debt is a home that a link could not be given in full. A settled one is kept, because the device may have been set up
// for another claim in between, with the stand-in for the name to restore.
type debt struct {
	home
	settled bool
}

// Debt is names that a link on the host is owed, since others had taken them when it came home.
type Debt struct {
	// Device is the device's name, and Link how its link is recognised.
	Device string       `json:"device"`
	Link   nic.Identity `json:"link"`
	// Name and AltNames are what it is to be called.
	Name     string   `json:"name"`
	AltNames []string `json:"altNames,omitempty"`
	// Settled is true when it has them, or is in a pod again, whose record may have the stand-in for its name.
	Settled bool `json:"settled"`
}

// Debts keeps which names links are owed for the next life of the agent.
type Debts interface {
	SaveDebt(Debt) error
}

// Owe takes over the debts of an earlier life.
func (m *Mover) Owe(debts []Debt) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range debts {
		to := home{device: d.Device, id: d.Link, want: nic.State{Name: d.Name, AltNames: d.AltNames}}
		m.misnamed[d.Link] = debt{home: to, settled: d.Settled}
	}
}

// owe notes a debt, for this life and the next. It needs the lock.
func (m *Mover) owe(d debt) {
	before, known := m.misnamed[d.id]
	m.misnamed[d.id] = d
	same := known && before.settled == d.settled && before.want.Name == d.want.Name && slices.Equal(before.want.AltNames, d.want.AltNames)
	if same || m.cfg.Debts == nil {
		return
	}
	err := m.cfg.Debts.SaveDebt(Debt{Device: d.device, Link: d.id, Name: d.want.Name, AltNames: d.want.AltNames, Settled: d.settled})
	if err != nil {
		m.log.Warn("Names that a link is owed could not be kept; if the agent is started again it keeps the one that it has",
			"device", d.device, "interface", d.want.Name, "error", err)
	}
}

// homeOf returns the home with a state, but for the names that the link is still owed.
func (m *Mover) homeOf(device string, id nic.Identity, want nic.State) home {
	m.mu.Lock()
	defer m.mu.Unlock()
	if owed, ok := m.misnamed[id]; ok && (!owed.settled || nic.IsStandIn(want.Name)) {
		want.Name, want.AltNames = owed.want.Name, owed.want.AltNames
	}
	return home{device: device, id: id, want: want}
}

// noteNames keeps in mind which names of a link on the host others have taken.
func (m *Mover) noteNames(to home, taken []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	owed, known := m.misnamed[to.id]
	known = known && !owed.settled
	switch {
	case len(taken) > 0:
		m.owe(debt{home: to})
		if !known {
			m.log.Warn("The link is home, but other links have taken names of it; it gets them when they are free",
				"device", to.device, "taken", taken)
		}
	case known:
		owed.settled = true
		m.owe(owed)
		m.log.Info("The link has its names on the host again", "device", to.device, "interface", to.want.Name)
	}
}

// owed returns the homes that are not settled, sorted by the device's name.
func (m *Mover) owed() []home {
	m.mu.Lock()
	defer m.mu.Unlock()
	var homes []home
	for _, d := range m.misnamed {
		if !d.settled {
			homes = append(homes, d.home)
		}
	}
	slices.SortFunc(homes, func(a, b home) int { return strings.Compare(a.device, b.device) })
	return homes
}

// Repair gives links that came home without one of their names what is free by now. It is to be called now and then,
// such as every ten seconds; without such links it does nothing. A link that is in a pod again is left there.
func (m *Mover) Repair(ctx context.Context) error {
	homes := m.owed()
	if len(homes) == 0 {
		return nil
	}
	host, err := m.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	var errs []error
	for _, to := range homes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := m.repair(host, to); err != nil {
			errs = append(errs, fmt.Errorf("repair device %s: %w", to.device, err))
		}
	}
	return errors.Join(errs...)
}

// repair changes names only: the device may have been set up for another claim meanwhile.
func (m *Mover) repair(host *nic.Place, to home) error {
	link, err := host.Find(to.id, nil)
	if err != nil {
		return err
	}
	if link == nil {
		// In a pod, from where Detach gives it its names, or gone.
		m.mu.Lock()
		defer m.mu.Unlock()
		m.owe(debt{home: to, settled: true})
		return nil
	}
	names := nic.Read(link)
	names.Name, names.AltNames = to.want.Name, to.want.AltNames
	to.want = names
	return m.restore(host, link, to)
}
