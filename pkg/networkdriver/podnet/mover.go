// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package podnet moves links between the network namespaces of the host and of pods.
//
// What a link is, and how it comes home, is [nic]'s. This package adds what the driver's pods need: the way in, in one
// request so that nobody sees a link that has arrived half-way, and names that are owed to links whose own was taken.
// Whatever fails, the link ends up on the host as it was, or an error says where it is not.
//
// XDP programs of the host are detached on the way in, so that they do not act in a pod, and not put back.
package podnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rdma"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

var (
	// ErrLinkGone is returned by [Mover.Attach] when the device's link is neither on the host nor in the pod's
	// namespace. A dummy link dies with a namespace it is left in, as happens when the runtime makes a pod's sandbox
	// anew: [types.Device.Setup] makes another, and Attach can be tried again with the device that Setup returns. A PCI
	// device's link is in another namespace, from where [Mover.Detach] fetches it.
	ErrLinkGone = errors.New("its link is neither on the host nor in the pod's network namespace")

	// ErrAnotherLink is returned by [Mover.Attach] when the device's link is not the one that was asked for: the device was
	// made anew, or bound to its driver again. What was found of the former link need not hold of this one.
	ErrAnotherLink = errors.New("its link is another one than a moment ago")

	// ErrHostNamespace is returned when a pod's network namespace turns out to be the host's own.
	ErrHostNamespace = errors.New("is the host's own network namespace, which devices are not moved into")

	// ErrUnreachable is returned by [Mover.Detach] when a link is not to be found that exists.
	ErrUnreachable = nic.ErrUnreachable
)

// NameTakenError says that another link of the pod has the name that an interface was to get.
type NameTakenError struct{ Name string }

func (e *NameTakenError) Error() string {
	return fmt.Sprintf("interface name %q is taken in the pod's network namespace", e.Name)
}

// Config says where a Mover works.
type Config struct {
	// HostNetNS is the path of the network namespace that links come from and return to. Empty: this process's.
	HostNetNS string
	// Sysfs is the mount point of a sysfs that shows HostNetNS. Empty: /sys.
	Sysfs string
	// NetSysctls is a writable mount of /proc/sys/net. Empty: /proc/sys/net.
	NetSysctls string
	// RDMA has the RDMA devices of links follow them. Nil: the kernel does.
	RDMA Follower
	// Debts, which may be nil, keeps which names links are owed.
	Debts Debts
}

// Mover moves links. Different devices may be moved at the same time; calls for one device are for the caller to put
// in order. It holds no descriptor between calls, so that it keeps no namespace alive.
type Mover struct {
	log *slog.Logger
	cfg Config

	// mu guards misnamed.
	mu sync.Mutex
	// misnamed are links that came home while names of theirs were taken.
	misnamed map[nic.Identity]debt
}

// New returns a Mover.
func New(log *slog.Logger, cfg Config) *Mover {
	if cfg.HostNetNS == "" {
		// Not /proc/self, which is the main thread: that may be in a pod's namespace to open a socket there just now.
		cfg.HostNetNS = "/proc/thread-self/ns/net"
	}
	if cfg.Sysfs == "" {
		cfg.Sysfs = "/sys"
	}
	if cfg.NetSysctls == "" {
		cfg.NetSysctls = "/proc/sys/net"
	}
	if cfg.RDMA == nil {
		cfg.RDMA = rdma.NewFollower()
	}
	return &Mover{log: log, cfg: cfg, misnamed: map[nic.Identity]debt{}}
}

// HostIndex returns the index of the device's link on the host, 0 if it is not there. The kernel gives it to no other link in the
// life of the node.
func (m *Mover) HostIndex(ctx context.Context, dev types.Device) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	host, err := m.openHost()
	if err != nil {
		return 0, err
	}
	defer host.Close()
	link, err := host.Find(dev.Link(), nil)
	if err != nil || link == nil {
		return 0, err
	}
	return link.Attrs().Index, nil
}

// Attach moves the device's link from the host into the network namespace at netnsPath, gives it the configuration's name
// (empty: the name it has) and MTU, and brings it up. A link that is there already gets name and state, so that Attach can be
// repeated; its MTU is the pod's own matter then. The
// caller fills in the attachment's SandboxID.
//
// Of a NIC of hardware it moves the link with the index index, as [Mover.HostIndex] told it, and no other.
//
// An alternative name of the link that the pod cannot have is removed; [Mover.Detach] puts it back. When Attach fails
// the link is back on the host with its name, MTU, MAC, alternative names and state. The error is or wraps
// [*NameTakenError], [ErrLinkGone], [ErrAnotherLink], [ErrHostNamespace] or the kernel's answer.
func (m *Mover) Attach(ctx context.Context, netnsPath string, dev types.Device, index int, config types.DeviceConfig) (*types.Attachment, error) {
	att, err := m.attach(ctx, netnsPath, dev, index, config)
	if err != nil {
		return nil, fmt.Errorf("attach device %s: %w", dev.IfName(), err)
	}
	return att, nil
}

func (m *Mover) attach(ctx context.Context, netnsPath string, dev types.Device, index int, config types.DeviceConfig) (*types.Attachment, error) {
	podIfName := config.PodIfName
	id := dev.Link()
	if id.IsZero() {
		return nil, errors.New("it has no link")
	}
	if podIfName != "" {
		if err := types.ValidatePodIfName(podIfName); err != nil {
			return nil, err
		}
	}
	host, err := m.openHost()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	pod, err := m.openPod(netnsPath, host.NS.ID)
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	link, err := host.Find(id, nil)
	if err != nil {
		return nil, err
	}
	if link == nil {
		att, err := m.settle(pod, dev, config)
		if err == nil {
			err = m.enterRDMA(host, pod, dev, att.IfName, config)
		}
		return att, err
	}
	if id.Physical() && link.Attrs().Index != index {
		return nil, ErrAnotherLink
	}
	name := podIfName
	if name == "" {
		name = link.Attrs().Name
	}
	if taken, err := pod.ByName(name); err != nil {
		return nil, err
	} else if taken != nil {
		return nil, &NameTakenError{Name: name}
	}

	before := m.homeOf(dev.IfName(), id, nic.Read(link))
	var att *types.Attachment
	err = m.leaveRDMA(host, dev)
	if err == nil {
		att, err = m.arrive(host, pod, link, name, config)
	}
	if err == nil {
		err = m.enterRDMA(host, pod, dev, name, config)
	}
	if err == nil {
		return att, nil
	}
	before.index = link.Attrs().Index
	undoErr := m.undo(host, pod, before, config.InPod())
	if undoErr == nil {
		undoErr = m.returnRDMA(host, pod, dev)
	}
	if undoErr != nil {
		return nil, fmt.Errorf("%w; giving it back failed too: %w", err, undoErr)
	}
	return nil, err
}

// arrive moves the link and configures it there.
func (m *Mover) arrive(host, pod *nic.Place, link netlink.Link, name string, config types.DeviceConfig) (*types.Attachment, error) {
	if err := m.moveIn(host, pod, link, name, config); err != nil {
		return nil, err
	}
	// The name was free and the kernel took it, so that it leads to the link, whatever index that has now.
	link, err := pod.ByName(name)
	if err == nil && link == nil {
		err = fmt.Errorf("link %q was not there any more after the move", name)
	}
	if err != nil {
		return nil, err
	}
	n := config.InPod()
	if n == nil {
		return attachment(pod.NS.Path, link, nil), nil
	}
	if err := m.bringUp(pod, link, n, false); err != nil {
		return nil, err
	}
	return m.described(pod, link)
}

// bringUp brings a link up in the pod, and configures it. again is [configure]'s.
func (m *Mover) bringUp(pod *nic.Place, link netlink.Link, n *types.Network, again bool) error {
	attrs := link.Attrs()
	if err := m.setInterface(pod.NS, attrs.Name, n.Interface); err != nil {
		return err
	}
	if err := pod.Change(attrs.Index, rtlink.Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}); err != nil {
		return fmt.Errorf("bring link %q up in %s: %w", attrs.Name, pod.NS.Path, err)
	}
	return configure(pod, attrs.Index, n, again)
}

// described returns the attachment of a link with the addresses that it has.
func (m *Mover) described(pod *nic.Place, link netlink.Link) (*types.Attachment, error) {
	ips, err := addresses(pod, link.Attrs().Index)
	if err != nil {
		return nil, err
	}
	return attachment(pod.NS.Path, link, ips), nil
}

// moveIn moves the link in one request, and brings it up unless it has to be configured before. The kernel checks names late: it refuses a move for an alternative name that the
// target has, and a rename only after the move.
func (m *Mover) moveIn(host, pod *nic.Place, link netlink.Link, name string, config types.DeviceConfig) error {
	attrs := link.Attrs()
	if slices.Contains(attrs.AltNames, name) {
		if err := host.RemoveAltName(attrs.Index, name); err != nil {
			return err
		}
	}
	if err := host.RemoveXDP(link); err != nil {
		m.log.Warn("An XDP program of the host stays on a link that moves into a pod",
			"interface", attrs.Name, "error", err)
	}
	into := rtlink.Change{To: pod.NS, MTU: config.MTU(), Name: name, Flags: unix.IFF_UP, Mask: unix.IFF_UP}
	if config.InPod() != nil {
		into.Flags = 0
	}
	crashpoint.Here(crashpoint.AttachBefore)
	err := host.Change(attrs.Index, into)
	crashpoint.Here(crashpoint.AttachMoved)
	if errors.Is(err, unix.EEXIST) {
		removed, altErr := host.RemoveTakenAltNames(pod, link)
		if altErr != nil {
			return altErr
		}
		if removed {
			err = host.Change(attrs.Index, into)
		}
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return &NameTakenError{Name: name}
	case err != nil:
		return fmt.Errorf("move link %q into %s as %q and bring it up: %w", attrs.Name, pod.NS.Path, name, err)
	}
	return nil
}

// undo is what Attach does when it fails. Rules that cannot be removed lead nowhere, and do not keep the link from coming home.
func (m *Mover) undo(host, pod *nic.Place, to home, n *types.Network) error {
	return errors.Join(m.takeBack(host, pod, to), removeRules(pod, n))
}

// takeBack brings home a link that is in the pod or on its way there. One that has taken its place meanwhile is left as it is.
func (m *Mover) takeBack(host, pod *nic.Place, to home) error {
	link, err := pod.Find(to.id, nil)
	if err != nil {
		return err
	}
	if link != nil {
		link, err = host.BringHome(pod, link, to.id, to.want)
	} else {
		link, err = host.Find(to.id, nil)
		if link != nil && to.id.Physical() && to.index != 0 && link.Attrs().Index != to.index {
			return ErrAnotherLink
		}
	}
	if err != nil {
		return err
	}
	if link == nil {
		return ErrLinkGone
	}
	return m.restore(host, link, to)
}

// settle gives a link that is in the pod already its name, brings it up and makes up for what it lacks of its configuration.
func (m *Mover) settle(pod *nic.Place, dev types.Device, config types.DeviceConfig) (*types.Attachment, error) {
	name := config.PodIfName
	link, err := pod.Find(dev.Link(), nil)
	if err != nil {
		return nil, err
	}
	if link == nil {
		return nil, ErrLinkGone
	}
	attrs := link.Attrs()
	want := rtlink.Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}
	if name != "" && attrs.Name != name {
		taken, err := pod.ByName(name)
		if err != nil {
			return nil, err
		}
		if taken != nil && taken.Attrs().Index != attrs.Index {
			return nil, &NameTakenError{Name: name}
		}
		if slices.Contains(attrs.AltNames, name) {
			if err := pod.RemoveAltName(attrs.Index, name); err != nil {
				return nil, err
			}
		}
		want.Name, attrs.Name = name, name
	}
	if want.Name != "" || attrs.RawFlags&unix.IFF_UP == 0 {
		if err := pod.ChangeInPlace(attrs.Index, want); err != nil {
			return nil, fmt.Errorf("name link %q and bring it up in %s: %w", attrs.Name, pod.NS.Path, err)
		}
	}
	if n := config.InPod(); n != nil {
		if err := m.bringUp(pod, link, n, true); err != nil {
			return nil, err
		}
	}
	return m.described(pod, link)
}

// Detach gives the device's link back to the host and restores what [types.Device.HostState] says, as [nic.Place.Restore]
// does. It may be repeated at any time: a link that is home and right is left alone.
//
// The link is fetched from the namespace at netnsPath, which may be empty or gone, or from wherever it is
// ([nic.Place.Fetch]). A link that does not exist any more is success, one that cannot be found is [ErrUnreachable].
//
// If another link of the host has taken the name or an alternative name meanwhile, that is no error, since the pod
// cannot mend it: the link gets a name like netdrv0, a warning is logged, and [Mover.Repair] or another Detach renames it
// when its name is free.
func (m *Mover) Detach(ctx context.Context, netnsPath string, dev types.Device) error {
	if dev.Link().IsZero() {
		return nil
	}
	if err := m.detach(ctx, netnsPath, dev); err != nil {
		return fmt.Errorf("detach device %s: %w", dev.IfName(), err)
	}
	return nil
}

func (m *Mover) detach(ctx context.Context, netnsPath string, dev types.Device) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	host, err := m.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	want := dev.HostState()
	if want.Name == "" {
		want.Name = dev.KernelIfName()
	}
	to := m.homeOf(dev.IfName(), dev.Link(), want)
	crashpoint.Here(crashpoint.DetachBefore)
	link, err := host.Fetch(ctx, nic.Search{ID: to.id, Want: to.want, Named: []string{netnsPath}})
	crashpoint.Here(crashpoint.DetachMoved)
	if err != nil || link == nil {
		return err
	}
	err = m.restore(host, link, to)
	crashpoint.Here(crashpoint.DetachRestored)
	if err != nil || types.RDMADeviceOf(dev).Name == "" {
		return err
	}
	pod, err := m.openPod(netnsPath, host.NS.ID)
	switch {
	case err == nil:
		defer pod.Close()
	case !errors.Is(err, netnamespace.ErrNone) && !errors.Is(err, ErrHostNamespace):
		return err
	}
	return m.returnRDMA(host, pod, dev)
}

// Tidy removes from a network namespace that lives on what a link of the configuration has not taken with it when it left. A path
// that is empty, or of a namespace that is gone, is no error.
func (m *Mover) Tidy(netnsPath string, config types.DeviceConfig) error {
	n := config.InPod()
	if netnsPath == "" || n == nil || !n.PolicyRouting {
		return nil
	}
	host, err := m.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	pod, err := m.openPod(netnsPath, host.NS.ID)
	if errors.Is(err, netnamespace.ErrNone) {
		return nil
	} else if err != nil {
		return err
	}
	defer pod.Close()
	return removeRules(pod, n)
}

// restore makes the device's link on the host what it was.
func (m *Mover) restore(host *nic.Place, link netlink.Link, to home) error {
	taken, err := host.Restore(link, to.want)
	if err != nil {
		return err
	}
	m.noteNames(to, taken)
	return nil
}

// Place says where a device's link is.
type Place int

const (
	// Gone: nowhere. A virtual link has ended; a PCI device was removed, or has no driver that makes a link.
	Gone Place = iota
	// InPod: in the pod's network namespace.
	InPod
	// OnHost: in the host's.
	OnHost
	// Elsewhere: in a third one, such as one that the pod has made.
	Elsewhere
)

// Sighting is where a device's link was seen.
type Sighting struct {
	Place Place
	// Attachment says how it is attached, if it is in the pod.
	Attachment *types.Attachment
	// Why says what has become of one that is gone.
	Why string
}

// Where looks for the device's link in the network namespace at netnsPath, on the host and elsewhere, and changes nothing.
// A namespace that is gone, or has no path, holds nothing and is no error.
func (m *Mover) Where(ctx context.Context, netnsPath string, dev types.Device) (Sighting, error) {
	seen, err := m.where(ctx, netnsPath, dev)
	if err != nil {
		return Sighting{}, fmt.Errorf("look for device %s in %s: %w", dev.IfName(), netnsPath, err)
	}
	return seen, nil
}

func (m *Mover) where(ctx context.Context, netnsPath string, dev types.Device) (Sighting, error) {
	if err := ctx.Err(); err != nil {
		return Sighting{}, err
	}
	if dev.Link().IsZero() {
		return Sighting{Why: "the device has no link"}, nil
	}
	host, err := m.openHost()
	if err != nil {
		return Sighting{}, err
	}
	defer host.Close()
	if att, err := m.lookIn(host, netnsPath, dev); err != nil || att != nil {
		return Sighting{Place: InPod, Attachment: att}, err
	}
	if link, err := host.Find(dev.Link(), nil); err != nil || link != nil {
		return Sighting{Place: OnHost}, err
	}
	elsewhere, why, err := host.Elsewhere(ctx, dev.Link())
	if elsewhere {
		return Sighting{Place: Elsewhere}, nil
	}
	return Sighting{Why: why}, err
}

// lookIn returns how the device is attached in the namespace, nil if it is not.
func (m *Mover) lookIn(host *nic.Place, netnsPath string, dev types.Device) (*types.Attachment, error) {
	if netnsPath == "" {
		return nil, nil
	}
	pod, err := m.openPod(netnsPath, host.NS.ID)
	if errors.Is(err, netnamespace.ErrNone) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer pod.Close()
	link, err := pod.Find(dev.Link(), nil)
	if err != nil || link == nil {
		return nil, err
	}
	return m.described(pod, link)
}

// openHost opens the host's side.
func (m *Mover) openHost() (*nic.Place, error) {
	host, err := nic.Open(m.log, m.cfg.HostNetNS, m.cfg.Sysfs)
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	return host, nil
}

// openPod opens the pod's side, which must not be the host's.
func (m *Mover) openPod(path string, host netnamespace.ID) (*nic.Place, error) {
	pod, err := nic.Open(m.log, path, "")
	if err != nil {
		return nil, err
	}
	if pod.NS.ID == host {
		pod.Close()
		return nil, fmt.Errorf("%q %w", path, ErrHostNamespace)
	}
	return pod, nil
}

func attachment(netnsPath string, link netlink.Link, ips []string) *types.Attachment {
	attrs := link.Attrs()
	return &types.Attachment{
		NetNS:   netnsPath,
		IfName:  attrs.Name,
		IfIndex: attrs.Index,
		MAC:     attrs.HardwareAddr.String(),
		IPs:     ips,
	}
}

// addresses returns the link's addresses with their prefix length. Those of link scope say nothing: the kernel makes them
// up by itself.
func addresses(pod *nic.Place, index int) ([]string, error) {
	addrs, err := pod.Addrs(index)
	if err != nil {
		return nil, err
	}
	var ips []string
	for _, a := range addrs {
		if a.Scope != unix.RT_SCOPE_LINK {
			ips = append(ips, a.IPNet.String())
		}
	}
	return ips, nil
}
