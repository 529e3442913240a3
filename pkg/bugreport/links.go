// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package bugreport

import (
	"log/slog"

	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// Link is what the kernel says of a link.
type Link struct {
	Index     int      `json:"index"`
	Name      string   `json:"name"`
	AltNames  []string `json:"altNames,omitempty"`
	Kind      string   `json:"kind"`
	MAC       string   `json:"mac,omitempty"`
	MTU       int      `json:"mtu"`
	Flags     string   `json:"flags"`
	OperState string   `json:"operState"`
	// Master is the index of the link that this one belongs to, such as a bond, and Parent that of the link it stands on.
	Master int `json:"master,omitempty"`
	Parent int `json:"parent,omitempty"`
	// Device is the address of the hardware on its bus.
	Device string `json:"device,omitempty"`
	// VFs are those of a PF, as its driver has them on record.
	VFs []netlink.VfInfo `json:"vfs,omitempty"`
	// VFError says why they could not be read.
	VFError string `json:"vfError,omitempty"`
}

// ReadLinks returns the links of the own network namespace, which is the node's for the agent.
func ReadLinks() ([]Link, error) {
	conn, err := rtlink.DialPath(slog.New(slog.DiscardHandler), "")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	all, err := conn.List()
	if err != nil {
		return nil, err
	}
	links := make([]Link, 0, len(all))
	for _, l := range all {
		a := l.Attrs()
		link := Link{
			Index: a.Index, Name: a.Name, AltNames: a.AltNames, Kind: l.Type(), MAC: a.HardwareAddr.String(), MTU: a.MTU, Flags: a.Flags.String(),
			OperState: a.OperState.String(), Master: a.MasterIndex, Parent: a.ParentIndex, Device: a.ParentDev,
		}
		if a.ParentDev != "" {
			if link.VFs, err = readVFs(conn, a.Index); err != nil {
				link.VFError = err.Error()
			}
		}
		links = append(links, link)
	}
	return links, nil
}

func readVFs(conn *rtlink.Conn, pf int) ([]netlink.VfInfo, error) {
	message, err := conn.VFTable(pf)
	if err != nil {
		return nil, err
	}
	link, err := netlink.LinkDeserialize(nil, message)
	if err != nil {
		return nil, err
	}
	return link.Attrs().Vfs, nil
}
