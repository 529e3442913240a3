// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package dummy offers Linux dummy links, dummy0 to dummy<count-1>. A link is made when a claim is prepared and removed
// when it is freed; before, there is nothing but the name. Links of this manager are known by their alias,
// networkdriver:dummy<n>, so that one which somebody else made is never given to a pod and never deleted.
package dummy

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// MaxCount is the highest number of dummy links.
	MaxCount = 1024

	foreignReason = "a link of that name exists on the host and was not made by this driver"
)

// Manager implements [types.DeviceManager] for dummy links.
type Manager struct {
	log   *slog.Logger
	count int
	links links
}

var _ types.DeviceManager = (*Manager)(nil)

// New returns a manager of the configured number of dummy links in the network namespace of this process. A nil
// configuration offers none; devices can be restored all the same.
func New(log *slog.Logger, cfg *v2alpha1.DummyDeviceManagerConfig) *Manager {
	m := &Manager{log: log, links: kernelLinks{log: log, kind: linkKind}}
	if cfg != nil && cfg.Enabled {
		m.count = int(cfg.Count)
	}
	return m
}

// Type implements [types.DeviceManager].
func (m *Manager) Type() types.DeviceManagerType { return types.DeviceManagerTypeDummy }

// Run implements [types.DeviceManager]. Names that another link of the host has are left out as long as it has them.
func (m *Manager) Run(ctx context.Context, publish func(types.Snapshot)) error {
	var last *types.Snapshot
	return rescan.Run(ctx, m.log, m.links.watch, func() error {
		switch snapshot, err := m.scan(); {
		case err != nil && last == nil:
			return fmt.Errorf("find out which names are free: %w", err)
		case err != nil:
			m.log.Warn("Names of dummy links could not be checked, the last inventory stays", "error", err)
		case last == nil || !reflect.DeepEqual(snapshot, *last):
			publish(snapshot)
			last = &snapshot
		}
		return nil
	})
}

func (m *Manager) scan() (types.Snapshot, error) {
	var s types.Snapshot
	count := m.count
	if count < 0 || count > MaxCount {
		s.Problems = append(s.Problems, types.Problem{
			Field: "dummy.count", Message: fmt.Sprintf("%d is not in 0..%d, no dummy link is offered", count, MaxCount),
		})
		count = 0
	}
	foreign := map[string]bool{}
	if count > 0 {
		present, err := m.links.list()
		if err != nil {
			return types.Snapshot{}, err
		}
		for _, l := range present {
			if !l.ours {
				foreign[l.name] = true
			}
		}
	}
	for i := range count {
		name := nameOf(i)
		if foreign[name] {
			s.Skipped = append(s.Skipped, types.Skipped{Device: name, Reason: foreignReason})
			continue
		}
		s.Devices = append(s.Devices, &device{links: m.links, name: name, mtu: defaultMTU})
	}
	return s, nil
}

// RestoreDevice implements [types.DeviceManager].
func (m *Manager) RestoreDevice(data []byte) (types.Device, error) {
	return restore(m.links, data)
}

var _ types.Unfinished = (*Manager)(nil)

// RestoreUnfinished implements [types.Unfinished]: a link is found by its name and alias, and has nothing to go back to.
func (m *Manager) RestoreUnfinished(data []byte) (types.Device, error) {
	r, err := decode(data)
	if err != nil {
		return nil, err
	}
	return &device{links: m.links, name: r.Name}, nil
}
