// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// errHostNetwork refuses a pod on the host network: attaching to it would rename and move the node's own interfaces.
var errHostNetwork = errors.New("the pod runs on the host network, where a device cannot be attached; " +
	"remove hostNetwork or the claim from the pod")

// Outside is the real [World].
type Outside struct {
	*podnet.Mover
	*podnet.Announcer
	// StatusWriter is set before the room is used: it goes by the driver's name, which the node config says.
	StatusWriter
	// Gate, Metadata and ClaimReader go by the driver's name too.
	Gate
	Metadata
	ClaimReader
	Events
	// Addresses go by the journal.
	Addresses
	// Journal is set before the room is used, and Checkers, the device managers that check their devices, too.
	Journal
	Checkers  map[types.DeviceManagerType]types.Checker
	hostNetNS os.FileInfo
}

var _ World = (*Outside)(nil)

// NewOutside takes the namespace of the process for the host's. It is asked for once, since a thread may be in a pod's
// namespace later on.
func NewOutside(mover *podnet.Mover, announcer *podnet.Announcer, events Events) (*Outside, error) {
	host, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("look up the host's network namespace: %w", err)
	}
	return &Outside{Mover: mover, Announcer: announcer, Events: events, hostNetNS: host}, nil
}

// CheckNetNS implements [World].
func (o *Outside) CheckNetNS(path string) error {
	if path == "" {
		return errHostNetwork
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("network namespace %s of the pod is gone", path)
	case err != nil:
		return fmt.Errorf("network namespace of the pod: %w", err)
	case os.SameFile(info, o.hostNetNS):
		return errHostNetwork
	}
	return nil
}

// Validate implements [World].
func (o *Outside) Validate(dev types.Device, config types.DeviceConfig) error {
	return dev.Validate(config)
}

// Remember implements [World].
func (o *Outside) Remember(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error) {
	if r, ok := dev.(types.Rememberer); ok {
		return r.Remember(ctx, config)
	}
	return dev, nil
}

// Setup implements [World].
func (o *Outside) Setup(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error) {
	return dev.Setup(ctx, config)
}

// Free implements [World]. A device that had another driver has its link back before.
func (o *Outside) Free(ctx context.Context, dev types.Device, config types.DeviceConfig) error {
	if r, ok := dev.(types.Rebindable); ok {
		home, err := r.BindBack(ctx)
		if err == nil && home != dev {
			err = o.Detach(ctx, "", home)
		}
		if err != nil {
			return err
		}
		dev = home
	}
	return dev.Free(ctx, config)
}

// Check implements [World]: each manager is asked once.
func (o *Outside) Check(ctx context.Context, rows []*tables.DRAAllocation) []error {
	errs := make([]error, len(rows))
	for manager, checker := range o.Checkers {
		var devices []types.Prepared
		var places []int
		for i, row := range rows {
			if row.Manager == manager {
				devices, places = append(devices, types.Prepared{Device: row.PreparedDevice, Config: row.Config}), append(places, i)
			}
		}
		if len(devices) == 0 {
			continue
		}
		for i, err := range checker.Check(ctx, devices) {
			errs[places[i]] = err
		}
	}
	return errs
}

// Now implements [World].
func (o *Outside) Now() time.Time { return time.Now() }

// WithTimeout implements [World].
func (o *Outside) WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, limit)
}
