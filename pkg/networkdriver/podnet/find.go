// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// side is one end of a move: a namespace and a socket in it.
type side struct {
	*rtlink.Conn
	ns *netnamespace.Namespace
}

func openSide(log *slog.Logger, ns *netnamespace.Namespace) (*side, error) {
	c, err := rtlink.Dial(log, ns)
	if err != nil {
		ns.Close()
		return nil, err
	}
	return &side{Conn: c, ns: ns}, nil
}

func (s *side) close() {
	s.Conn.Close()
	s.ns.Close()
}

func (m *Mover) openHost() (*side, error) {
	ns, err := netnamespace.Open(m.cfg.HostNetNS)
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	return openSide(m.log, ns)
}

// openPod opens the pod's side, which must not be the host's.
func (m *Mover) openPod(path string, host *netnamespace.Namespace) (*side, error) {
	ns, err := netnamespace.Open(path)
	if err != nil {
		return nil, err
	}
	if ns.ID == host.ID {
		ns.Close()
		return nil, fmt.Errorf("%q %w", path, ErrHostNamespace)
	}
	return openSide(m.log, ns)
}

// is says whether the link has the identity.
func is(link netlink.Link, id types.LinkID) bool {
	attrs := link.Attrs()
	switch {
	case id.PCIAddr != "":
		return attrs.ParentDevBus == "pci" && attrs.ParentDev == id.PCIAddr
	case id.Kind == "" || link.Type() != id.Kind:
		return false
	case id.Alias != "":
		return attrs.Alias == id.Alias
	default:
		return attrs.Index == id.IfIndex
	}
}

// find returns the link with the identity, nil if it is not in the namespace.
func find(c *rtlink.Conn, id types.LinkID) (netlink.Link, error) {
	if id.IfIndex > 0 {
		link, err := c.ByIndex(id.IfIndex)
		if err != nil {
			return nil, err
		}
		if link != nil && is(link, id) {
			return link, nil
		}
	}
	links, err := c.List()
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		if is(link, id) {
			return link, nil
		}
	}
	return nil, nil
}

// findOnHost returns the link with the identity, nil if it is not on the host. sysfs leads from a PCI address to an index
// without a list of all links of the node. It is a hint: the name it goes by may change while it is read, so that the
// kernel is asked whether the index belongs to the address, and for the list if not.
func (m *Mover) findOnHost(host *side, id types.LinkID) (netlink.Link, error) {
	if id.PCIAddr != "" {
		if !validPCIAddr(id.PCIAddr) {
			return nil, fmt.Errorf("%.64q is not a PCI address", id.PCIAddr)
		}
		names, _ := os.ReadDir(m.pciPath(id.PCIAddr, "net"))
		for _, name := range names {
			raw, err := os.ReadFile(m.pciPath(id.PCIAddr, "net", name.Name(), "ifindex"))
			if err != nil {
				continue
			}
			index, err := strconv.Atoi(strings.TrimSpace(string(raw)))
			if err != nil || index <= 0 {
				continue
			}
			link, err := host.ByIndex(index)
			if err != nil {
				return nil, err
			}
			if link != nil && is(link, id) {
				return link, nil
			}
		}
	}
	return find(host.Conn, id)
}

func (m *Mover) pciPath(addr string, elem ...string) string {
	return filepath.Join(append([]string{m.cfg.Sysfs, "bus/pci/devices", addr}, elem...)...)
}

// validPCIAddr keeps an address from leading elsewhere in sysfs.
func validPCIAddr(addr string) bool {
	return addr != "" && strings.Trim(addr, "0123456789abcdef:.") == "" && !strings.Contains(addr, "..")
}

// noLinkDrivers are drivers for PCI devices that userspace drives, which have no link.
var noLinkDrivers = map[string]bool{"vfio-pci": true, "uio_pci_generic": true, "igb_uio": true}

// canHaveLink says whether a link of the PCI device can exist in some namespace, and if not why.
func (m *Mover) canHaveLink(addr string) (bool, string) {
	if _, err := os.Stat(m.pciPath("")); err != nil {
		return true, "" // sysfs cannot be read, so that nothing is known
	}
	if _, err := os.Stat(m.pciPath(addr)); os.IsNotExist(err) {
		return false, "the PCI device is not on the bus any more"
	}
	driver, err := os.Readlink(m.pciPath(addr, "driver"))
	if os.IsNotExist(err) {
		return false, "the PCI device has no driver"
	}
	if name := filepath.Base(driver); err == nil && noLinkDrivers[name] {
		return false, "the PCI device is bound to " + name
	}
	return true, ""
}

// stateOf is what a link is restored to if it is touched now.
func stateOf(link netlink.Link) types.LinkState {
	attrs := link.Attrs()
	return types.LinkState{
		Name:     attrs.Name,
		AltNames: attrs.AltNames,
		MTU:      attrs.MTU,
		MAC:      attrs.HardwareAddr.String(),
		Up:       attrs.RawFlags&unix.IFF_UP != 0,
	}
}
