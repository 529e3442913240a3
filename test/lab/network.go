// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// Names and addresses in the lab's network namespace. They are the same in
// every lab, since each lab has a namespace of its own.
const (
	managementBridge  = "br-mgmt"   // joins the nodes and the control plane
	uplinkBridge      = "br-uplink" // the switch that the SR-IOV ports are plugged into
	managementAddress = "10.88.0.1"
	managementPrefix  = 24
	hostLinkName      = "host0" // the namespace's end of the link to the host

	// serviceAddress is the cluster IP of the Service kubernetes, by which pods reach the API server. It is an address of
	// the control plane, so that it needs no kube-proxy; other Services have none.
	serviceAddress = "10.96.0.1"
)

// network is a lab's place in this machine's networks.
type network struct {
	Namespace string // name of the network namespace
	HostLink  string // the host's end of the link into it
	Address   string // the namespace's address on that link
}

func (n network) path() string { return netns.Path(n.Namespace) }

// createNetwork makes the network namespace of the lab in a state directory,
// with its bridges and a link to the host.
func createNetwork(state string) (network, error) {
	h := fnv.New32a()
	h.Write([]byte(filepath.Clean(state)))
	id := h.Sum32()
	n := network{
		Namespace: fmt.Sprintf("ndlab-%08x", id),
		HostLink:  fmt.Sprintf("ndlab%08x", id),
	}
	// No lab is up in the directory: what has these names is the rest of one
	// that crashed.
	if err := n.delete(); err != nil {
		return n, err
	}
	if err := netns.Create(n.Namespace); err != nil {
		return n, err
	}
	if err := n.fill(id); err != nil {
		return n, errors.Join(err, n.delete())
	}
	return n, nil
}

func (n *network) fill(id uint32) error {
	inside, err := n.handle()
	if err != nil {
		return err
	}
	defer inside.Close()
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := inside.LinkSetUp(lo); err != nil {
		return err
	}
	for _, name := range []string{managementBridge, uplinkBridge} {
		bridge := &netlink.Bridge{LinkAttrs: linkAttrs(name)}
		if err := addUp(inside, bridge); err != nil {
			return err
		}
		if name == managementBridge {
			if err := addAddress(inside, bridge, managementAddress, managementPrefix); err != nil {
				return err
			}
			if err := addAddress(inside, bridge, serviceAddress, 32); err != nil {
				return err
			}
		}
	}
	// The nodes' default gateway: it forwards between their pods.
	if err := netns.Do(n.path(), func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }); err != nil {
		return err
	}
	return n.linkToHost(inside, id)
}

// routeTo sends packets for a node's pods to the node.
func (n network) routeTo(cidr, via string) error {
	inside, err := n.handle()
	if err != nil {
		return err
	}
	defer inside.Close()
	_, dst, err := net.ParseCIDR(cidr)
	if err != nil {
		return err
	}
	if err := inside.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)}); err != nil {
		return fmt.Errorf("route to %s: %w", cidr, err)
	}
	return nil
}

// linkToHost joins the host to the namespace, so that programs on the host
// reach the API server as it is. The addresses are from the block for
// benchmarks (RFC 2544), where no real network is.
func (n *network) linkToHost(inside *netlink.Handle, id uint32) error {
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer host.Close()
	hostIP, insideIP, err := freeSubnet(host, id)
	if err != nil {
		return err
	}
	ns, err := vnetns.GetFromPath(n.path())
	if err != nil {
		return err
	}
	defer ns.Close()
	veth := &netlink.Veth{LinkAttrs: linkAttrs(n.HostLink), PeerName: hostLinkName, PeerNamespace: netlink.NsFd(ns)}
	if err := addUp(host, veth); err != nil {
		return err
	}
	if err := addAddress(host, veth, hostIP.String(), 30); err != nil {
		return err
	}
	peer, err := inside.LinkByName(hostLinkName)
	if err != nil {
		return err
	}
	if err := inside.LinkSetUp(peer); err != nil {
		return err
	}
	n.Address = insideIP.String()
	return addAddress(inside, peer, n.Address, 30)
}

// freeSubnet returns two addresses of a /30 that no link of the host has.
func freeSubnet(host *netlink.Handle, id uint32) (hostIP, insideIP net.IP, err error) {
	addrs, err := host.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, nil, fmt.Errorf("listing addresses: %w", err)
	}
	const tries = 64
	for try := range uint32(tries) {
		slot := (id + try) % (1 << 13) // of 198.18.0.0/17
		subnet := net.IPv4(198, 18, byte(slot>>6), byte(slot<<2))
		taken := false
		for _, a := range addrs {
			taken = taken || a.IP.Mask(net.CIDRMask(30, 32)).Equal(subnet)
		}
		if !taken {
			base := subnet.To4()
			return net.IPv4(base[0], base[1], base[2], base[3]+1), net.IPv4(base[0], base[1], base[2], base[3]+2), nil
		}
	}
	return nil, nil, errors.New("no free subnet for the link to the lab")
}

// uplinkMTU is what the uplinks' switch passes, as switches do that are set up
// for jumbo frames. The nodes' NICs have 1500 unless somebody raises it.
const uplinkMTU = 9216

// addTap makes a tap for a node's NIC and plugs it into a bridge.
func (n network) addTap(name, bridge string) error {
	inside, err := n.handle()
	if err != nil {
		return err
	}
	defer inside.Close()
	master, err := inside.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", bridge, err)
	}
	tap, err := inside.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		// The tap's driver puts it into the namespace of the thread that opens it.
		err = netns.Do(n.path(), func() error {
			return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: linkAttrs(name), Mode: netlink.TUNTAP_MODE_TAP})
		})
		if err == nil {
			tap, err = inside.LinkByName(name)
		}
	}
	if err != nil {
		return fmt.Errorf("tap %s: %w", name, err)
	}
	if err := inside.LinkSetMaster(tap, master); err != nil {
		return fmt.Errorf("plugging %s into %s: %w", name, bridge, err)
	}
	if bridge == uplinkBridge {
		if err := inside.LinkSetMTU(tap, uplinkMTU); err != nil {
			return fmt.Errorf("MTU of %s: %w", name, err)
		}
	}
	return inside.LinkSetUp(tap)
}

func (n network) deleteTap(name string) error {
	inside, err := n.handle()
	if err != nil {
		return err
	}
	defer inside.Close()
	tap, err := inside.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	return inside.LinkDel(tap)
}

// delete removes the namespace and with it all its links.
func (n network) delete() error {
	var errs []error
	// The namespace goes some time after its last process: the host's link, which
	// a next lab in the same directory names alike, goes now.
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer host.Close()
	if link, err := host.LinkByName(n.HostLink); err == nil {
		errs = append(errs, host.LinkDel(link))
	}
	return errors.Join(append(errs, netns.Delete(n.Namespace))...)
}

// handle returns a netlink connection into the namespace.
func (n network) handle() (*netlink.Handle, error) {
	ns, err := vnetns.GetFromPath(n.path())
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", n.Namespace, err)
	}
	defer ns.Close()
	return netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
}

func linkAttrs(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

func addUp(h *netlink.Handle, l netlink.Link) error {
	if err := h.LinkAdd(l); err != nil {
		return fmt.Errorf("adding %s %s: %w", l.Type(), l.Attrs().Name, err)
	}
	added, err := h.LinkByName(l.Attrs().Name)
	if err != nil {
		return err
	}
	l.Attrs().Index = added.Attrs().Index
	return h.LinkSetUp(l)
}

func addAddress(h *netlink.Handle, l netlink.Link, ip string, prefix int) error {
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(ip), Mask: net.CIDRMask(prefix, 32)}}
	if err := h.AddrAdd(l, addr); err != nil {
		return fmt.Errorf("address %s on %s: %w", ip, l.Attrs().Name, err)
	}
	return nil
}
