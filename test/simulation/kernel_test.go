// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// limbo is where the link is of a VF whose namespace has died, until the kernel has put it on the host.
const limbo = "limbo"

// kernel has the VFs of one PF, a virtual link, and network namespaces.
type kernel struct {
	sim        *sim
	vfs        []*vf
	namespaces map[string]*namespace
}

// vf is a VF with its link, and the PF's record of it; or a virtual link, which is there when somebody makes it, has no VLAN, and
// ends with the namespace that it is in.
type vf struct {
	name    string
	id      int
	virtual bool
	// present is false while the PF has no VFs.
	present     bool
	incarnation int
	vlan        int
	drivers
	// links is how many links it has had.
	links int

	// netns is where the link is, "" for the host.
	netns  string
	ifName string
	mac    string
	// addresses are those that the link has got when it last came into a pod. Elsewhere it has none.
	addresses []netip.Prefix

	// upset is when somebody else than the driver last changed it, retagged when its VLAN alone was, and entered when it last came into a pod.
	upset, retagged, entered time.Time
	// checked is when the driver last looked at it, by who did.
	checked map[string]time.Time
}

// namespace is one that is alive.
type namespace struct {
	path string
	pod  *pod
	// own is one that the pod has made itself.
	own bool
}

func newKernel(s *sim, vfs int) *kernel {
	k := &kernel{sim: s, namespaces: map[string]*namespace{}}
	for i := range vfs + 1 {
		v := &vf{name: fmt.Sprintf("0000-03-10-%d", i), id: i, virtual: i == vfs, checked: map[string]time.Time{}}
		v.ofNode = ownDriver
		if i == userspaceVF {
			v.ofNode = types.DriverVFIO
		}
		k.vfs = append(k.vfs, v)
		if v.virtual {
			v.name = "dummy0"
		} else {
			v.make()
		}
	}
	for _, v := range k.vfs[:vfs] {
		k.group(v)
	}
	return k
}

func (v *vf) hostName() string {
	if v.virtual {
		return v.name
	}
	return fmt.Sprintf("ens1f0v%d", v.id)
}

// make is a new VF.
func (v *vf) make() {
	v.incarnation++
	v.links++
	v.present = true
	v.vlan, v.netns, v.ifName = 0, "", v.hostName()
	v.drivers.make()
	v.mac = v.permanentMAC()
}

func (v *vf) permanentMAC() string { return fmt.Sprintf("02:00:00:00:%02x:%02x", v.incarnation, v.id) }

func (v *vf) hasLink() bool { return v.present && v.driver == ownDriver }

// atHome says whether the VF is as it was before any claim had it.
func (v *vf) atHome() bool {
	if v.virtual {
		return !v.present
	}
	return v.present && v.drivers.home() && v.netns == "" && v.ifName == v.hostName() && v.vlan == 0 && v.mac == v.permanentMAC()
}

func (v *vf) String() string {
	return fmt.Sprintf("%s (VLAN %d, interface %s in %q, made %d times, present %v, %s, %s)", v.name, v.vlan, v.ifName, v.netns,
		v.incarnation, v.present, v.describe(), v.mac)
}

// attachment is how the link is where it is.
func (v *vf) attachment() *types.Attachment {
	a := &types.Attachment{NetNS: v.netns, IfName: v.ifName, IfIndex: 10 + v.id, MAC: v.mac}
	for _, address := range v.addresses {
		a.IPs = append(a.IPs, address.String())
	}
	return a
}

// in returns the VFs whose links are in the namespace.
func (k *kernel) in(netns string) (there []*vf) {
	for _, v := range k.vfs {
		if v.hasLink() && v.netns == netns {
			there = append(there, v)
		}
	}
	return there
}

func (k *kernel) vf(name string) *vf {
	for _, v := range k.vfs {
		if v.name == name {
			return v
		}
	}
	return nil
}

// nameIn returns the wanted name if no other link of the namespace has it, else a stand-in.
func (k *kernel) nameIn(netns, want string, of *vf) string {
	for _, v := range k.vfs {
		if v != of && v.hasLink() && v.netns == netns && v.ifName == want {
			return fmt.Sprintf("dev%d", of.id)
		}
	}
	return want
}

// end ends a namespace. Links in it come home some time later, under the name that they have.
func (k *kernel) end(path string) {
	if k.namespaces[path] == nil {
		return
	}
	delete(k.namespaces, path)
	for _, v := range k.vfs {
		if !v.hasLink() || v.netns != path {
			continue
		}
		if v.virtual {
			v.present = false
			continue
		}
		incarnation := v.incarnation
		v.netns = limbo
		k.sim.after("the kernel brings "+v.name+" home", span{time.Millisecond, 300 * time.Millisecond}, func() {
			if v.incarnation == incarnation && v.netns == limbo {
				v.netns, v.ifName = "", k.nameIn("", v.ifName, v)
			}
		})
	}
}

// device is a VF, or a virtual link, as the driver knows it; its JSON form goes into records and the journal.
type device struct {
	// Made is which of the virtual links of the name it is, 0 for one that is not prepared.
	Virtual bool `json:"virtual,omitempty"`
	Made    int  `json:"made,omitempty"`

	Name string `json:"name"`
	VF   int    `json:"vf"`
	// Driver is the one that the VF was found with, Group the number of its IOMMU group.
	Driver   string    `json:"driver,omitempty"`
	Group    int       `json:"group,omitempty"`
	Kernel   string    `json:"kernelIfName"`
	MAC      string    `json:"mac"`
	Original *original `json:"original,omitempty"`
}

// original is what a VF was found as.
type original struct {
	Name        string `json:"name"`
	MAC         string `json:"mac"`
	VLAN        int    `json:"vlan"`
	Incarnation int    `json:"incarnation"`
	// Rebound is true for a VF that has another driver for as long as it is the claim's.
	Rebound bool `json:"rebound,omitempty"`
}

var _ types.Device = &device{}

func (d *device) IfName() string       { return d.Name }
func (d *device) KernelIfName() string { return d.Kernel }
func (d *device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	return nil
}
func (d *device) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool { return true }
func (d *device) Link() nic.Identity {
	switch {
	case d.Virtual:
		return nic.Identity{Kind: "dummy", Alias: d.Name, Index: d.Made}
	case d.Driver == types.DriverVFIO, d.Original != nil && d.Original.Rebound:
		return nic.Identity{}
	}
	return nic.PCI(d.Name)
}
func (d *device) Validate(types.DeviceConfig) error { return nil }

func (d *device) HostState() nic.State {
	if d.Original == nil {
		return nic.State{}
	}
	return nic.State{Name: d.Original.Name, MAC: d.Original.MAC}
}

func (d *device) Setup(context.Context, types.DeviceConfig) (types.Device, error) {
	return nil, errors.New("only by the world")
}
func (d *device) Free(context.Context, types.DeviceConfig) error {
	return errors.New("only by the world")
}

func (d *device) Merge(prepared types.Device) types.Device {
	merged := *prepared.(*device)
	merged.Original, merged.Made = nil, 0
	return &merged
}

func (d *device) MarshalJSON() ([]byte, error) {
	type plain device
	return json.Marshal((*plain)(d))
}

// manager restores VFs; what it discovers is published by the agent.
type manager struct{ kernel *kernel }

// virtualManager restores virtual links, also those that were never made.
type virtualManager struct{ manager }

func (virtualManager) Type() types.DeviceManagerType { return types.DeviceManagerTypeDummy }

func (m virtualManager) RestoreDevice(data []byte) (types.Device, error) {
	d, err := m.RestoreUnfinished(data)
	if err == nil && d.(*device).Made == 0 {
		err = errors.New("made: is missing, the device was not prepared")
	}
	return d, err
}

func (virtualManager) RestoreUnfinished(data []byte) (types.Device, error) {
	d := &device{}
	return d, json.Unmarshal(data, d)
}

func (manager) Type() types.DeviceManagerType { return types.DeviceManagerTypeSRIOV }

func (manager) Run(context.Context, func(types.Snapshot)) error { return errors.New("not used") }

func (m manager) RestoreDevice(data []byte) (types.Device, error) {
	d := &device{}
	if err := json.Unmarshal(data, d); err != nil {
		return nil, err
	}
	if d.Original == nil {
		return nil, errors.New("original: is missing, the device was not prepared")
	}
	if v := m.kernel.vf(d.Name); v.present {
		d.Group = v.iommuGroup
		if !d.Original.Rebound {
			d.Driver = cmp.Or(v.driver, d.Driver)
		}
	}
	return d, nil
}

// What follows is what the world's methods of the same names do at the moment that they do it.

// hostIndex tells the links apart that a VF has had.
func (k *kernel) hostIndex(dev types.Device) int {
	if v := k.vf(dev.IfName()); v.hasLink() && v.netns == "" {
		return v.links
	}
	return 0
}

func (k *kernel) attach(actor, netns string, dev types.Device, link int, config types.DeviceConfig) (*types.Attachment, error) {
	name := config.PodIfName
	ns := k.namespaces[netns]
	if ns == nil {
		return nil, fmt.Errorf("network namespace %s is gone", netns)
	}
	v := k.vf(dev.IfName())
	if !v.hasLink() || v.netns != "" && v.netns != netns {
		return nil, podnet.ErrLinkGone
	}
	if v.netns == "" && !v.virtual && v.links != link {
		return nil, podnet.ErrAnotherLink
	}
	if name == "" {
		name = v.ifName
	}
	if k.nameIn(netns, name, v) != name {
		return nil, &podnet.NameTakenError{Name: name}
	}
	entered := v.netns != netns
	v.netns, v.ifName, v.addresses = netns, name, nil
	if config.Joined != nil {
		v.addresses = config.Joined.Addresses
	}
	if entered {
		v.entered = time.Now()
		k.sim.checkEntered(v, ns, actor)
	}
	return v.attachment(), nil
}

func (k *kernel) detach(dev types.Device) error {
	v, d := k.vf(dev.IfName()), dev.(*device)
	if !v.hasLink() {
		return nil
	}
	if d.Virtual {
		v.netns, v.ifName = "", v.hostName()
		return nil
	}
	want := d.HostState()
	if want.Name == "" {
		want.Name = d.Kernel
	}
	v.netns, v.ifName = "", k.nameIn("", want.Name, v)
	if want.MAC != "" && d.Original.Incarnation == v.incarnation {
		v.mac = want.MAC // one made anew keeps its own
	}
	return nil
}

func (k *kernel) where(netns string, dev types.Device) podnet.Sighting {
	v := k.vf(dev.IfName())
	switch {
	case !v.hasLink():
		return podnet.Sighting{Why: "the device has no driver"}
	case v.netns != "" && v.netns == netns:
		return podnet.Sighting{Place: podnet.InPod, Attachment: v.attachment()}
	case v.netns == "":
		return podnet.Sighting{Place: podnet.OnHost}
	default:
		return podnet.Sighting{Place: podnet.Elsewhere}
	}
}

func (k *kernel) checkNetNS(netns string) error {
	if k.namespaces[netns] == nil {
		return fmt.Errorf("network namespace %s of the pod is gone", netns)
	}
	return nil
}

func (k *kernel) remember(dev types.Device, cfg types.DeviceConfig) (*device, error) {
	d := dev.(*device)
	if d.Original != nil || d.Virtual {
		return d, nil
	}
	v := k.vf(d.Name)
	if !v.present || v.driver == "" {
		return nil, errors.New("no driver is bound to it")
	}
	if v.netns != "" {
		return nil, errors.New("its interface is not in the host's network namespace although the driver is bound")
	}
	if cfg.Driver != "" {
		if err := v.rebindable(cfg.Driver); err != nil {
			return nil, err
		}
	}
	found := *d
	found.Driver, found.Group = v.driver, v.iommuGroup
	found.Original = &original{MAC: v.mac, VLAN: v.vlan, Incarnation: v.incarnation, Rebound: cfg.Driver != "" && cfg.Driver != v.driver}
	if v.hasLink() {
		found.Kernel, found.MAC, found.Original.Name = v.ifName, v.mac, v.ifName
	}
	return &found, nil
}

func (k *kernel) setup(actor string, dev types.Device, cfg types.DeviceConfig) (types.Device, error) {
	d, err := k.remember(dev, cfg)
	if err != nil {
		return nil, err
	}
	v := k.vf(d.Name)
	if d.Virtual {
		if v.present && v.incarnation == d.Made {
			return d, nil
		}
		v.make()
		made := *d
		made.Made = v.incarnation
		return &made, nil
	}
	if !v.present || v.driver == "" && !d.Original.Rebound {
		return nil, errors.New("no driver is bound to it")
	}
	if d.Original.Incarnation != v.incarnation {
		anew, o := *d, *d.Original
		o.Incarnation, o.MAC = v.incarnation, v.mac
		anew.Original, anew.MAC = &o, v.mac
		if !k.sim.mutant.oldGroup {
			anew.Group = v.iommuGroup
		}
		d = &anew
	}
	if d.Original.Rebound {
		v.lentMAC = d.Original.MAC
	}
	v.vlan, v.checked[actor] = cfg.VLAN(), time.Now()
	return d, nil
}

func (k *kernel) free(dev types.Device) error {
	d := dev.(*device)
	v := k.vf(d.Name)
	if d.Virtual {
		v.present = false
	}
	if d.Original != nil && v.present {
		v.vlan = d.Original.VLAN
	}
	return nil
}

func (k *kernel) check(actor string, row *tables.DRAAllocation) error {
	d := row.PreparedDevice.(*device)
	v := k.vf(d.Name)
	v.checked[actor] = time.Now()
	switch {
	case d.Virtual:
		return nil // nobody checks them
	case !v.present:
		return errors.New("the device is gone")
	case v.vlan != row.Config.VLAN():
		return types.AstrayError{Reason: fmt.Sprintf("the PF has it in VLAN %d instead of %d", v.vlan, row.Config.VLAN())}
	case d.Original.Incarnation != v.incarnation:
		return errors.New("it was made anew")
	case row.Config.Driver != "" && v.driver != row.Config.Driver:
		return fmt.Errorf("the driver %q is bound to it instead of %s", v.driver, row.Config.Driver)
	}
	return nil
}

// snapshot is what discovery sees of the VFs.
func (k *kernel) snapshot(prepared, away func(string) bool) types.Snapshot {
	var s types.Snapshot
	for _, v := range k.vfs {
		if v.virtual {
			continue
		}
		d := &device{Name: v.name, VF: v.id, Driver: v.driver, Group: v.iommuGroup}
		switch {
		case !v.present:
			continue
		case away(v.name):
			d.Driver = v.ofNode // it is offered as it was found
		case v.driver == types.DriverVFIO:
		case v.driver == "":
			s.Skipped = append(s.Skipped, types.Skipped{Device: v.name, Reason: "no driver"})
			continue
		case v.netns == "":
			d.Kernel, d.MAC = v.ifName, v.mac
		case !prepared(v.name):
			s.Skipped = append(s.Skipped, types.Skipped{Device: v.name, Reason: "its interface is missing"})
			continue
		}
		s.Devices = append(s.Devices, d)
	}
	return s
}

// podOf returns the pod that a namespace is of.
func (k *kernel) podOf(netns string) (uid kubetypes.UID) {
	if ns := k.namespaces[netns]; ns != nil {
		return ns.pod.uid
	}
	return ""
}
