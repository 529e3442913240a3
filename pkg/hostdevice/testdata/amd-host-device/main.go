// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command amd-host-device is the plugin with its files in the directory that it is called from.
package main

import (
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/cilium/networkdriver/pkg/hostdevice"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

func main() {
	plugin := hostdevice.New()
	dir := filepath.Dir(os.Args[0])
	plugin.NodeConfig, plugin.Owners = filepath.Join(dir, "node.json"), nicowner.Dir(filepath.Join(dir, "owners"))
	skel.PluginMainFuncs(plugin.Funcs(), hostdevice.Versions, "under test")
}
