// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
)

// Config are the driver's flags.
type Config struct {
	EnableNetworkDriver       bool
	EnableCiliumNetworkDriver bool
	NodeName                  string
	SysfsPath                 string
	NetSysctlPath             string
	KubeletRootDir            string
	NRISocketPath             string
	NRIPluginIndex            string
	CDISpecDir                string
	GateHookPath              string
	JournalDir                string

	AutoCreateCiliumNodeResource bool
}

// Flags implements [cell.Flagger].
func (c Config) Flags(flags *pflag.FlagSet) {
	flags.Bool("enable-network-driver", c.EnableNetworkDriver, "Enable the network driver")
	flags.Bool("enable-cilium-network-driver", c.EnableCiliumNetworkDriver, "Alias of --enable-network-driver")
	flags.String("node-name", c.NodeName, "Name of the Kubernetes node (default $K8S_NODE_NAME, else the host name)")
	flags.String("sysfs-path", c.SysfsPath, "Where the host's sysfs is mounted (default /host/sys when it is there, else /sys)")
	flags.String("net-sysctl-path", c.NetSysctlPath, "A writable mount of /proc/sys/net (default /host/proc/sys/net when it is there, else /proc/sys/net)")
	flags.String("kubelet-root-dir", c.KubeletRootDir, "Kubelet's data directory, where plugins register")
	flags.String("nri-socket-path", c.NRISocketPath, "The container runtime's NRI socket")
	flags.String("nri-plugin-index", c.NRIPluginIndex, "Two digits that order the driver among the runtime's NRI plugins")
	flags.String("cdi-spec-dir", c.CDISpecDir, "Folder of CDI spec files that the container runtime reads, and that a reboot empties")
	flags.String("gate-hook-path", c.GateHookPath, "The program networkdriver-hook on the node, by a path that is the agent's too; the runtime calls it for containers that list a claim (default none)")
	flags.String("journal-dir", c.JournalDir, "Directory on the node, and gone with a reboot, where the driver notes what it changes, so that it can be undone; not the pod's own")
	flags.Bool("auto-create-cilium-node-resource", c.AutoCreateCiliumNodeResource, "Make the node's CiliumNode and keep its labels like the Node's; off beside Cilium, which does that")
}

var defaultConfig = Config{
	KubeletRootDir: "/var/lib/kubelet",
	NRISocketPath:  "/var/run/nri/nri.sock",
	NRIPluginIndex: nri.DefaultIndex,
	CDISpecDir:     "/var/run/cdi",
	JournalDir:     "/run/cilium/networkdriver",

	AutoCreateCiliumNodeResource: true,
}

// enabled is true for either spelling of the flag.
func (c Config) enabled() bool { return c.EnableNetworkDriver || c.EnableCiliumNetworkDriver }

// complete fills in the defaults that depend on the host.
func (c Config) complete() (Config, error) {
	if c.NodeName == "" {
		c.NodeName = os.Getenv("K8S_NODE_NAME")
	}
	if c.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return c, fmt.Errorf("neither --node-name nor $K8S_NODE_NAME is set, and the host has no name: %w", err)
		}
		c.NodeName = name
	}
	if c.SysfsPath == "" {
		c.SysfsPath = "/sys"
		if _, err := os.Stat("/host/sys/bus/pci"); err == nil {
			c.SysfsPath = "/host/sys"
		}
	}
	if c.NetSysctlPath == "" {
		c.NetSysctlPath = "/proc/sys/net"
		if _, err := os.Stat("/host/proc/sys/net"); err == nil {
			c.NetSysctlPath = "/host/proc/sys/net"
		}
	}
	return c, nil
}
