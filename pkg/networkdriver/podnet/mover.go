// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package podnet moves links between the network namespaces of the host and of pods.
//
// A link is recognised by what it is ([types.LinkID]) and never by its name, which a pod may change. Moving, renaming
// and bringing up is one request to the kernel, so that nobody sees a link that has arrived half-way. Whatever fails,
// the link ends up on the host as it was, or an error says where it is not.
//
// What does not cross the boundary, in either direction: addresses, routes and rules (the kernel drops them with a
// move), qdiscs and tc filters (likewise), and XDP programs (detached here, so that neither the host's acts in a pod nor
// a pod's on the host; one attached by a BPF link that a process still holds cannot be detached and is logged). They are
// not put back on the host afterwards. Links that a pod stacked on the device, such as VLANs, stay in the pod's
// namespace and die with it.
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

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

var (
	// ErrLinkGone is returned by [Mover.Attach] when the device's link is neither on the host nor in the pod's
	// namespace. A dummy link dies with a namespace it is left in, as happens when the runtime makes a pod's sandbox
	// anew: [types.Device.Setup] makes another, and Attach can be tried again with the device that Setup returns. A PCI
	// device's link is in another namespace, from where [Mover.Detach] fetches it.
	ErrLinkGone = errors.New("its link is neither on the host nor in the pod's network namespace")

	// ErrHostNamespace is returned when a pod's network namespace turns out to be the host's own.
	ErrHostNamespace = errors.New("is the host's own network namespace, which devices are not moved into")

	// ErrUnreachable is returned by [Mover.Detach] when the link of a PCI device is not to be found.
	ErrUnreachable = errors.New("its link is in no namespace that can be reached")
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
}

// Mover moves links. Different devices may be moved at the same time; calls for one device are for the caller to put
// in order. It holds no descriptor between calls, so that it keeps no namespace alive.
type Mover struct {
	log *slog.Logger
	cfg Config

	// mu guards misnamed.
	mu sync.Mutex
	// misnamed are links that came home while names of theirs were taken.
	misnamed map[types.LinkID]debt
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
	return &Mover{log: log, cfg: cfg, misnamed: map[types.LinkID]debt{}}
}

// Attach moves the device's link from the host into the network namespace at netnsPath, names it podIfName (empty: the
// name it has) and brings it up. A link that is there already gets name and state, so that Attach can be repeated. The
// caller fills in the attachment's SandboxID.
//
// An alternative name of the link that the pod cannot have is removed; [Mover.Detach] puts it back. When Attach fails
// the link is back on the host with its name, MTU, MAC, alternative names and state. The error is or wraps
// [*NameTakenError], [ErrLinkGone], [ErrHostNamespace] or the kernel's answer.
func (m *Mover) Attach(ctx context.Context, netnsPath string, dev types.Device, podIfName string) (*types.Attachment, error) {
	att, err := m.attach(ctx, netnsPath, dev, podIfName)
	if err != nil {
		return nil, fmt.Errorf("attach device %s: %w", dev.IfName(), err)
	}
	return att, nil
}

func (m *Mover) attach(ctx context.Context, netnsPath string, dev types.Device, podIfName string) (*types.Attachment, error) {
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
	defer host.close()
	pod, err := m.openPod(netnsPath, host.ns)
	if err != nil {
		return nil, err
	}
	defer pod.close()
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	link, err := m.findOnHost(host, id)
	if err != nil {
		return nil, err
	}
	if link == nil {
		return m.settle(pod, dev, podIfName)
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

	before := m.homeOf(dev.IfName(), id, stateOf(link))
	if err = m.moveIn(host, pod, link, name); err == nil {
		// The name was free and the kernel took it, so that it leads to the link, whatever index that has now.
		if link, err = pod.ByName(name); err == nil && link != nil {
			return attachment(netnsPath, link, nil), nil
		}
		if err == nil {
			err = fmt.Errorf("link %q was not there any more after the move", name)
		}
	}
	if undoErr := m.undo(host, pod, before); undoErr != nil {
		return nil, fmt.Errorf("%w; giving it back failed too: %w", err, undoErr)
	}
	return nil, err
}

// moveIn moves the link in one request. The kernel checks names late: it refuses a move for an alternative name that the
// target has, and a rename only after the move.
func (m *Mover) moveIn(host, pod *side, link netlink.Link, name string) error {
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
	into := rtlink.Change{To: pod.ns, Name: name, Flags: unix.IFF_UP, Mask: unix.IFF_UP}
	err := host.Change(attrs.Index, into)
	if errors.Is(err, unix.EEXIST) {
		removed, altErr := removeTakenAltNames(host, pod, link)
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
		return fmt.Errorf("move link %q into %s as %q and bring it up: %w", attrs.Name, pod.ns.Path, name, err)
	}
	return nil
}

// removeTakenAltNames removes those alternative names of a link in from that another link in to has.
func removeTakenAltNames(from, to *side, link netlink.Link) (removed bool, err error) {
	index := link.Attrs().Index
	if here, err := from.ByIndex(index); err != nil || here == nil || here.Attrs().Name != link.Attrs().Name {
		return false, err // it has moved: what is found in to would be the link itself
	}
	for _, alt := range link.Attrs().AltNames {
		other, err := to.ByName(alt)
		if err != nil {
			return removed, err
		}
		if other == nil {
			continue
		}
		if err := from.RemoveAltName(index, alt); err != nil {
			return removed, err
		}
		removed = true
	}
	return removed, nil
}

// settle gives a link that is in the pod already its name and brings it up.
func (m *Mover) settle(pod *side, dev types.Device, name string) (*types.Attachment, error) {
	link, err := find(pod.Conn, dev.Link())
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
		if err := pod.changeInPlace(attrs.Index, want); err != nil {
			return nil, fmt.Errorf("name link %q and bring it up in %s: %w", attrs.Name, pod.ns.Path, err)
		}
	}
	ips, err := pod.addresses(attrs.Index)
	if err != nil {
		return nil, err
	}
	return attachment(pod.ns.Path, link, ips), nil
}

// Find says whether the device's link is in the network namespace at netnsPath, and how it is attached there. A
// namespace that is gone holds nothing and is no error.
func (m *Mover) Find(ctx context.Context, netnsPath string, dev types.Device) (*types.Attachment, bool, error) {
	att, err := m.lookIn(ctx, netnsPath, dev)
	if err != nil {
		return nil, false, fmt.Errorf("look for device %s in %s: %w", dev.IfName(), netnsPath, err)
	}
	return att, att != nil, nil
}

func (m *Mover) lookIn(ctx context.Context, netnsPath string, dev types.Device) (*types.Attachment, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if dev.Link().IsZero() || netnsPath == "" {
		return nil, nil
	}
	host, err := netnamespace.Open(m.cfg.HostNetNS)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	pod, err := m.openPod(netnsPath, host)
	if errors.Is(err, netnamespace.ErrNone) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer pod.close()
	link, err := find(pod.Conn, dev.Link())
	if err != nil || link == nil {
		return nil, err
	}
	ips, err := pod.addresses(link.Attrs().Index)
	if err != nil {
		return nil, err
	}
	return attachment(netnsPath, link, ips), nil
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
