// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab"
)

// hostState is what of a node's network a test must leave as it was.
type hostState struct {
	// Links are the links of the host by name.
	Links map[string]hostLink
	// VFs are the PF's settings of its VFs.
	VFs []hostVF
	// Namespaces are the named network namespaces.
	Namespaces int
}

type hostLink struct {
	MAC, Kind, Parent string
	MTU               int
	Up                bool
	AltNames          []string
}

type hostVF struct {
	VF   int    `json:"vf"`
	MAC  string `json:"mac"`
	VLAN int    `json:"vlan"`
}

// hostState reads the node's links and the PF's table of VFs. Links that the pod network makes for a pod are left out.
func (e *T) hostState(n *lab.Node) hostState {
	e.Helper()
	var links []struct {
		Name      string   `json:"ifname"`
		Flags     []string `json:"flags"`
		MTU       int      `json:"mtu"`
		Address   string   `json:"address"`
		AltNames  []string `json:"altnames"`
		ParentDev string   `json:"parentdev"`
		LinkInfo  struct {
			Kind string `json:"info_kind"`
		} `json:"linkinfo"`
		VFs []struct {
			VF       int    `json:"vf"`
			Address  string `json:"address"`
			VLANList []struct {
				VLAN int `json:"vlan"`
			} `json:"vlan_list"`
		} `json:"vfinfo_list"`
	}
	out := e.onNode(n, "ip -d -j link show")
	require.NoError(e, json.Unmarshal([]byte(out), &links), out)
	state := hostState{Links: map[string]hostLink{}}
	for _, l := range links {
		if l.LinkInfo.Kind == "veth" {
			continue
		}
		link := hostLink{MAC: l.Address, Kind: l.LinkInfo.Kind, Parent: l.ParentDev, MTU: l.MTU, AltNames: l.AltNames}
		for _, f := range l.Flags {
			link.Up = link.Up || f == "UP"
		}
		state.Links[l.Name] = link
		for _, vf := range l.VFs {
			row := hostVF{VF: vf.VF, MAC: vf.Address}
			for _, v := range vf.VLANList {
				row.VLAN = v.VLAN
			}
			state.VFs = append(state.VFs, row)
		}
	}
	return state
}

// requireRestored waits until the node is as it was: the links of before have their names, addresses, MTU and state,
// the PF's settings of its VFs are the same, and no link is there that was not.
func (e *T) requireRestored(n *lab.Node, before hostState) {
	e.Helper()
	e.eventually("host state of "+n.Name(), func() string { return e.difference(n, before) })
}

func (e *T) difference(n *lab.Node, before hostState) string {
	now := e.hostState(n)
	if len(before.VFs) == 0 && len(now.VFs) > 0 {
		// The test made the VFs; they stay, and must be as the kernel made them.
		for _, vf := range now.VFs {
			if vf.VLAN != 0 {
				return fmt.Sprintf("VF %d has VLAN %d", vf.VF, vf.VLAN)
			}
		}
		for name, l := range now.Links {
			if strings.HasPrefix(name, "dev") || l.Kind == "dummy" {
				return fmt.Sprintf("link %s (%+v) is left", name, l)
			}
		}
		return ""
	}
	return cmp.Diff(before, now)
}
