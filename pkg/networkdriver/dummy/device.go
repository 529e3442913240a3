// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dummy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	// defaultMTU is what the kernel gives a dummy link (ETH_DATA_LEN).
	defaultMTU = 1500
	// maxMTU is more than any link has and keeps a record from holding nonsense.
	maxMTU = 1 << 20
)

func nameOf(i int) string { return linkKind + strconv.Itoa(i) }

// validName says whether a device of this manager can have the name.
func validName(name string) bool {
	number, ok := strings.CutPrefix(name, linkKind)
	i, err := strconv.Atoi(number)
	return ok && err == nil && i >= 0 && i < MaxCount && name == nameOf(i)
}

// device is a dummy link, before Setup its name only.
type device struct {
	links links
	name  string
	// index is that of the link of a prepared device, 0 for any other.
	index int
	// mtu and mac are those of the link that was made, mac is empty before.
	mtu int
	mac string
}

// record is the form in claims' statuses. Agents of an earlier version refuse fields that they do not know.
type record struct {
	Name    string `json:"name"`
	IfIndex int    `json:"ifIndex"`
	MTU     int    `json:"mtu"`
	MAC     string `json:"mac"`
}

var _ types.Device = (*device)(nil)

// IfName implements [types.Device].
func (d *device) IfName() string { return d.name }

// KernelIfName implements [types.Device]. It is the name that the link gets when it is made.
func (d *device) KernelIfName() string { return d.name }

// Attrs implements [types.Device]. The MAC is made up by the kernel at Setup and unknown before.
func (d *device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	attrs := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"ifName":       {StringValue: ptr.To(d.name)},
		"kernelIfName": {StringValue: ptr.To(d.name)},
		"mtu":          {IntValue: ptr.To(int64(d.mtu))},
	}
	if d.mac != "" {
		attrs["mac"] = resourceapi.DeviceAttribute{StringValue: ptr.To(d.mac)}
	}
	return attrs
}

// Match implements [types.Device]. PF names say nothing about a dummy; parent links, PCI addresses, vendors, devices
// and drivers are what it does not have.
func (d *device) Match(f *v2alpha1.CiliumNetworkDriverDeviceFilter) bool {
	if f == nil {
		return false
	}
	hardware := len(f.ParentIfNames) + len(f.PciAddrs) + len(f.VendorIDs) + len(f.DeviceIDs) + len(f.Drivers)
	return hardware == 0 &&
		(len(f.DeviceManagers) == 0 || slices.Contains(f.DeviceManagers, types.DeviceManagerTypeDummy.String())) &&
		(len(f.IfNames) == 0 || slices.Contains(f.IfNames, d.name))
}

// Link implements [types.Device]. The alias is known before Setup, the index is not.
func (d *device) Link() nic.Identity {
	return nic.Identity{Kind: linkKind, Alias: aliasOf(d.name), Index: d.index}
}

// HostState implements [types.Device]. The kernel makes dummy links without ARP (dummy_setup in drivers/net/dummy.c).
func (d *device) HostState() nic.State {
	if d.index == 0 {
		return nic.State{}
	}
	return nic.State{Name: d.name, MTU: d.mtu, MAC: d.mac, NoARP: true}
}

// Validate implements [types.Device].
func (d *device) Validate(cfg types.DeviceConfig) error {
	if cfg.Vlan != nil {
		return errors.New("vlan: a dummy link has no VLAN, leave the parameter out")
	}
	if cfg.Driver != "" || cfg.Vhost {
		return errors.New("driver: a dummy link is no device that a program could drive; leave driver and vhost out")
	}
	if cfg.RDMA {
		return errors.New("rdma: a dummy link has no RDMA device; leave the parameter out")
	}
	if cfg.VLAN() != 0 {
		return fmt.Errorf("network: %s is VLAN %d, and nothing would hold a dummy link to it", cfg.Network, cfg.VLAN())
	}
	if !cfg.Rights().IsZero() {
		return fmt.Errorf("network: %s has settings for VFs (spec.vf), which a dummy link is not", cfg.Network)
	}
	return nil
}

// Setup implements [types.Device]. It makes the link, and again if the link of a prepared device has died with a pod's
// network namespace; the device it returns knows the new one. What was left of an earlier Setup that nobody remembers is
// replaced. A name that another link of the host has, and a kernel without dummy links, are errors that say so.
func (d *device) Setup(ctx context.Context, cfg types.DeviceConfig) (types.Device, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := d.Validate(cfg); err != nil {
		return nil, err
	}
	made, err := d.links.create(d.name, d.index)
	if err != nil {
		return nil, err
	}
	if made.index == d.index {
		return d, nil
	}
	return &device{links: d.links, name: d.name, index: made.index, mtu: made.mtu, mac: made.mac}, nil
}

// Free implements [types.Device].
func (d *device) Free(ctx context.Context, _ types.DeviceConfig) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return d.links.delete(d.name)
}

// Merge implements [types.Device]. Discovery does not look for the links that were made, which most often are in pods.
func (d *device) Merge(prepared types.Device) types.Device {
	p, ok := prepared.(*device)
	if !ok || p.name != d.name {
		return d
	}
	return &device{links: d.links, name: d.name, mtu: p.mtu, mac: p.mac}
}

// MarshalJSON implements [json.Marshaler].
func (d *device) MarshalJSON() ([]byte, error) {
	return json.Marshal(record{Name: d.name, IfIndex: d.index, MTU: d.mtu, MAC: d.mac})
}

// decode decodes what MarshalJSON wrote, and checks the name.
func decode(data []byte) (record, error) {
	var r record
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return record{}, fmt.Errorf("decode dummy device: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return record{}, errors.New("decode dummy device: data after its end")
	}
	if !validName(r.Name) {
		return record{}, fmt.Errorf("dummy device: name %.64q is none of %s to %s", r.Name, nameOf(0), nameOf(MaxCount-1))
	}
	return r, nil
}

// restore decodes what MarshalJSON wrote of a prepared device. Whoever may write a claim's status may have written it.
func restore(links links, data []byte) (types.Device, error) {
	r, err := decode(data)
	if err != nil {
		return nil, err
	}
	mac, err := net.ParseMAC(r.MAC)
	switch {
	case r.IfIndex <= 0 || r.IfIndex > 1<<31-1:
		return nil, fmt.Errorf("dummy device %s: ifIndex %d is not an interface index", r.Name, r.IfIndex)
	case r.MTU <= 0 || r.MTU > maxMTU:
		return nil, fmt.Errorf("dummy device %s: mtu %d is not in 1..%d", r.Name, r.MTU, maxMTU)
	case err != nil || len(mac) != 6 || mac.String() != r.MAC:
		return nil, fmt.Errorf("dummy device %s: mac %.64q is not an Ethernet address in lower case colon notation", r.Name, r.MAC)
	}
	return &device{links: links, name: r.Name, index: r.IfIndex, mtu: r.MTU, mac: r.MAC}, nil
}
