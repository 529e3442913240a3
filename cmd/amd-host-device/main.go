// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command amd-host-device is a CNI plugin that gives pods NICs of the host with their addresses and policy routes.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"

	"github.com/cilium/networkdriver/pkg/hostdevice"
	"github.com/cilium/networkdriver/pkg/version"
)

func main() {
	skel.PluginMainFuncs(hostdevice.New().Funcs(), hostdevice.Versions, "CNI plugin "+hostdevice.Name+" "+version.String())
}
