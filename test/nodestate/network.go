// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nodestate reads what of a node a test must leave as it was: its links and the PF's table of VFs, and more of what
// the driver, kubelet and the runtime keep there.
package nodestate

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/cilium/networkdriver/test/lab"
)

// Network is a node's network. An interface's index is no part of it.
type Network struct {
	// Links are the links of the host by name, without those that the pod network makes for a pod.
	Links map[string]Link
	// VFs are the PFs' settings of their VFs.
	VFs []VF
}

// Link is a link of the host.
type Link struct {
	MAC, Kind, Parent string
	MTU               int
	Up                bool
	AltNames          []string
	Alias, Group      string
	TxQLen            int
	Promiscuity       int
	AllMulti          int
	// Flags are those that stay as they are set: not UP, which is apart, and not what the cable decides.
	Flags []string
}

// VF is a PF's row of a VF.
type VF struct {
	PF         string
	VF         int
	MAC        string
	VLAN       int
	VLANQoS    int
	SpoofCheck bool
	Trust      bool
	LinkState  string
	MaxTxRate  int
	MinTxRate  int
}

// ipLink is a link as ip prints it.
type ipLink struct {
	Name        string   `json:"ifname"`
	Flags       []string `json:"flags"`
	MTU         int      `json:"mtu"`
	Address     string   `json:"address"`
	AltNames    []string `json:"altnames"`
	ParentDev   string   `json:"parentdev"`
	Alias       string   `json:"ifalias"`
	Group       string   `json:"group"`
	TxQLen      int      `json:"txqlen"`
	Promiscuity int      `json:"promiscuity"`
	AllMulti    int      `json:"allmulti"`
	LinkInfo    struct {
		Kind string `json:"info_kind"`
	} `json:"linkinfo"`
	VFs []struct {
		VF       int    `json:"vf"`
		Address  string `json:"address"`
		VLANList []struct {
			VLAN int `json:"vlan"`
			QoS  int `json:"qos"`
		} `json:"vlan_list"`
		SpoofCheck bool   `json:"spoofchk"`
		Trust      bool   `json:"trust"`
		LinkState  string `json:"link_state"`
		Rate       struct {
			MaxTx int `json:"max_tx"`
			MinTx int `json:"min_tx"`
		} `json:"rate"`
	} `json:"vfinfo_list"`
}

// showLinks is the command whose output [parseLinks] reads.
const showLinks = "ip -d -j link show"

// ReadNetwork reads the node's network.
func ReadNetwork(ctx context.Context, n *lab.Node) (Network, error) {
	out, err := n.Run(ctx, showLinks)
	if err != nil {
		return Network{}, err
	}
	return parseLinks([]byte(out))
}

func parseLinks(data []byte) (Network, error) {
	var links []ipLink
	if err := json.Unmarshal(data, &links); err != nil {
		return Network{}, fmt.Errorf("links %.200q: %w", data, err)
	}
	network := Network{Links: map[string]Link{}}
	for _, l := range links {
		if l.LinkInfo.Kind == "veth" {
			continue
		}
		link := Link{
			MAC: l.Address, Kind: l.LinkInfo.Kind, Parent: l.ParentDev, MTU: l.MTU, AltNames: l.AltNames,
			Alias: l.Alias, Group: l.Group, TxQLen: l.TxQLen, Promiscuity: l.Promiscuity, AllMulti: l.AllMulti,
		}
		for _, flag := range l.Flags {
			switch flag {
			case "UP":
				link.Up = true
			case "LOWER_UP", "NO-CARRIER", "RUNNING", "DORMANT":
			default:
				link.Flags = append(link.Flags, flag)
			}
		}
		slices.Sort(link.Flags)
		network.Links[l.Name] = link
		for _, vf := range l.VFs {
			row := VF{
				PF: l.Name, VF: vf.VF, MAC: vf.Address, SpoofCheck: vf.SpoofCheck, Trust: vf.Trust, LinkState: vf.LinkState,
				MaxTxRate: vf.Rate.MaxTx, MinTxRate: vf.Rate.MinTx,
			}
			for _, v := range vf.VLANList {
				row.VLAN, row.VLANQoS = v.VLAN, v.QoS
			}
			network.VFs = append(network.VFs, row)
		}
	}
	return network, nil
}
