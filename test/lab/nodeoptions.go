// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"
)

// Environment variables with the options of nodes.
const (
	CDIEnv  = "NETWORKDRIVER_LAB_CDI"
	PFsEnv  = "NETWORKDRIVER_LAB_PFS"
	CPUsEnv = "NETWORKDRIVER_LAB_CPUS"
)

// Limits of what a node can have. More PFs were never tried.
const (
	maxPFs  = 2
	maxCPUs = 8
)

// NodeOptions are what all nodes of a lab have. The zero value of each field
// means what its environment variable says, or else the default.
type NodeOptions struct {
	// CDI is on or off: whether containerd is told to have, or not to have, the
	// Container Device Interface. By default it is told neither: containerd 1.7
	// has it off then, later ones on. 2.4 cannot have it off.
	CDI string

	// PFs is how many SR-IOV NICs a node has, 1 or 2. By default 1.
	PFs int

	// CPUs is how many processors a node has, up to 8. By default it is 1 in
	// emulation, where QEMU with more now and then loses a timer or aborts when a
	// PCI device's memory is mapped while another processor runs, and 2 with KVM.
	CPUs int
}

// withDefaults returns the options with the values of the environment where
// they are zero. A node's PFs are set then; no CPUs mean the default.
func (o NodeOptions) withDefaults(containerd string) (NodeOptions, error) {
	o.CDI = cmp.Or(o.CDI, os.Getenv(CDIEnv))
	var err error
	if o.PFs, err = numberOf(o.PFs, PFsEnv, 1); err != nil {
		return o, err
	}
	if o.CPUs, err = numberOf(o.CPUs, CPUsEnv, 0); err != nil {
		return o, err
	}
	switch {
	case o.CDI != "" && o.CDI != "on" && o.CDI != "off":
		return o, fmt.Errorf("CDI %q: want on or off", o.CDI)
	case o.CDI == "off" && !cdiHasSwitch(containerd):
		return o, fmt.Errorf("CDI off: containerd %s always has it on; 2.1 and older can have it off", containerd)
	case o.PFs < 1 || o.PFs > maxPFs:
		return o, fmt.Errorf("%d PFs of a node: want 1 to %d", o.PFs, maxPFs)
	case o.CPUs < 0 || o.CPUs > maxCPUs:
		return o, fmt.Errorf("%d processors of a node: want 1 to %d", o.CPUs, maxCPUs)
	}
	return o, nil
}

// numberOf returns the value, or if it is zero that of the environment
// variable, or else the default.
func numberOf(value int, env string, defaultValue int) (int, error) {
	text := os.Getenv(env)
	if value != 0 || text == "" {
		return cmp.Or(value, defaultValue), nil
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("$%s is %q: want a number", env, text)
	}
	return n, nil
}

// cdiHasSwitch reports whether this containerd's configuration can turn CDI
// off: that of 2.1 can, that of 2.4 cannot, and none between is pinned.
func cdiHasSwitch(containerd string) bool { return semver.Compare("v"+containerd, "v2.2.0-0") < 0 }

// containerdConfig returns the configuration of a containerd. NRI is on, which
// it is not by default in 1.7.
func containerdConfig(version, cdi string) string {
	enableCDI := ""
	if cdi != "" && cdiHasSwitch(version) {
		enableCDI = fmt.Sprintf("\n  enable_cdi = %t", cdi == "on")
	}
	switch {
	case strings.HasPrefix(version, "1."):
		return fmt.Sprintf(containerdCommon, 2) + `[plugins.'io.containerd.grpc.v1.cri']
  sandbox_image = '` + pauseImage + "'" + enableCDI + "\n"
	case cdiHasSwitch(version):
		return fmt.Sprintf(containerdCommon, 3) + containerdPinned + "[plugins.'io.containerd.cri.v1.runtime']" + enableCDI + "\n"
	default:
		return fmt.Sprintf(containerdCommon, 4) + containerdPinned + `[plugins.'io.containerd.nri.v1.nri'.default_validator]
  enable = true
`
	}
}

const containerdCommon = `version = %d
root = '/var/lib/containerd'
state = '/run/containerd'
# Two seconds by default, which is little in emulation.
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  plugin_request_timeout = '8s'
`

const containerdPinned = `[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '` + pauseImage + `'
`
