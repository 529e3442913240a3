// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types_test

import (
	"fmt"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Decoding is strict: what is not understood is an error that names the field, and never a device in the wrong network.
func ExampleParseDeviceConfig() {
	for _, parameters := range []string{
		`{"vlan": 1001, "podIfName": "sriov0"}`,
		`{"vlna": 1001}`,
		`{"vlan": 4095}`,
		`{"podIfName": "eth0"}`,
	} {
		cfg, err := types.ParseDeviceConfig([]byte(parameters))
		if err != nil {
			fmt.Println("refused:", err)
			continue
		}
		fmt.Printf("VLAN %d, interface %s\n", cfg.VLAN(), cfg.PodIfName)
	}
	// Output:
	// VLAN 1001, interface sriov0
	// refused: unknown field "vlna", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan
	// refused: vlan: 4095 is not in 0..4094
	// refused: podIfName: "eth0" is taken in every pod
}

// A class gives VLAN and name, the claim says another name: the stronger configuration wins field by field.
func ExampleDeviceConfig_Override() {
	class, err := types.ParseDeviceConfig([]byte(`{"vlan": 1001, "podIfName": "net1"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	claim, err := types.ParseDeviceConfig([]byte(`{"podIfName": "fast0"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	cfg := class.Override(claim)
	fmt.Printf("VLAN %d, interface %s\n", cfg.VLAN(), cfg.PodIfName)
	// Output: VLAN 1001, interface fast0
}
