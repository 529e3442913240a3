// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package gatehook is the last line of the gate before a claim's containers, of which package cdi is the first. A container
// that lists a claim is created while the claim's devices are in a sandbox, be it the container's own or another one: that
// of another pod of the claim, or a former one of the same pod. Or they have been lost since: a VF that is made anew is on the host,
// and its IOMMU group's number may be another device's. The agent tells all that, and while it is away a hook of the container does, which
// the OCI runtime runs on the node when the container has its namespaces and nothing of it has started (createRuntime). It takes what tenants may have a part in, such as annotations, for nothing but a reason to refuse.
package gatehook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic/sysfs"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const (
	// patience is how long an attach that is under way is waited for, and an agent that is just being started anew: kubelet takes a refusal
	// for a container that has ended. The runtime may leave the pod's other containers alone meanwhile, so it is shorter than the
	// time that probes usually leave between two failures.
	patience = 8 * time.Second
	// limit is how long the hook takes at most, whatever the runtime does.
	limit = patience + time.Second
	// Timeout is when the runtime is to kill it, in seconds.
	Timeout = 15

	firstPause, longestPause = 5 * time.Millisecond, 100 * time.Millisecond

	// sysfsRoot shows the host's network namespace, which the runtime runs its hooks in.
	sysfsRoot = "/sys"

	// maxState is far beyond what annotations of a container can make of its state.
	maxState = 8 << 20
	maxPlace = 64 << 10
)

// sandboxAnnotations are those by which container runtimes name a container's sandbox.
var sandboxAnnotations = []string{
	"io.kubernetes.cri.sandbox-id",  // containerd
	"io.kubernetes.cri-o.SandboxID", // CRI-O
}

// Suffix ends the names of the files that say where a claim's devices are.
const Suffix = ".json"

// Place says where the devices of a claim are. The agent writes it to a file, and the hook, which may be of another version,
// reads it: fields are added, not changed.
type Place struct {
	// NetNS is the network namespace that the devices were moved into.
	NetNS netnamespace.ID `json:"netns"`
	// Sandbox is the runtime's name of the sandbox that the namespace is of. The kernel uses the identity of a namespace
	// again, in no time when a sandbox is made anew; the runtime does not do that with a sandbox's.
	Sandbox string `json:"sandbox"`
	// Hardware are the devices that have one interface each, which was moved there.
	Hardware []Device `json:"hardware,omitempty"`
	// Claim and Pod are the namespaces and names of the claim and of the pod that has the devices, for people.
	Claim string `json:"claim"`
	Pod   string `json:"pod"`
}

// Device is a device of a bus of the node.
type Device struct {
	// Bus is the bus's name, such as pci, and Name the device's there, such as 0000:03:00.1.
	Bus  string `json:"bus"`
	Name string `json:"name"`
}

// Group is a PCI device and its IOMMU group, by whose number its node is called. The kernel gives numbers to other groups when devices
// are made anew. It is an argument of the hook, as the runtime has it from where it has the node.
type Group struct {
	// Device is the PCI address.
	Device string
	Number int64
}

func (g Group) String() string { return g.Device + "=" + strconv.FormatInt(g.Number, 10) }

// container is what the runtime says of the container, its OCI state.
type container struct {
	PID         int               `json:"pid"`
	Annotations map[string]string `json:"annotations"`
}

// Run says why the container whose OCI state is read must not start: it is not where the devices of its claim are, as
// the file says, for as long as an attach may take that is under way; or one of groups, in the form of [Group], is not the device's.
func Run(state io.Reader, file string, groups []string) error {
	result := make(chan error, 1)
	go func() { result <- run(state, file, groups, sysfsRoot, patience, time.Sleep) }()
	select {
	case err := <-result:
		return err
	case <-time.After(limit):
		return fmt.Errorf("the state of the container did not come within %s, which the container runtime writes to its hooks", limit)
	}
}

func run(state io.Reader, file string, groups []string, sysfsRoot string, patience time.Duration, sleep func(time.Duration)) error {
	c, err := read(state)
	if err != nil {
		return fmt.Errorf("state of the container: %w", err)
	}
	ns, err := netnamespace.Open("/proc/" + strconv.Itoa(c.PID) + "/ns/net")
	if err != nil {
		return fmt.Errorf("network namespace of the container: %w", err)
	}
	ns.Close() // the process has it for as long as the hook runs
	wait := firstPause
	for end := time.Now().Add(patience); ; wait = min(2*wait, longestPause) {
		// A node that the container was given of another device does not become the right one.
		if err := checkGroups(groups, sysfsRoot); err != nil {
			return err
		}
		err := c.check(ns.ID, file, sysfsRoot)
		if err == nil || !time.Now().Before(end) {
			return err
		}
		sleep(wait)
	}
}

func read(state io.Reader) (*container, error) {
	limited := &io.LimitedReader{R: state, N: maxState}
	c := &container{}
	switch err := json.NewDecoder(limited).Decode(c); {
	case err != nil && limited.N == 0:
		return nil, fmt.Errorf("is longer than %d bytes", maxState)
	case err != nil:
		return nil, err
	case c.PID <= 0:
		return nil, fmt.Errorf("pid: %d is not a process", c.PID)
	}
	return c, nil
}

// check says why the container, which is in the network namespace, is not where the file says that the devices are, or why they are
// not there any more.
func (c *container) check(netns netnamespace.ID, file, sysfsRoot string) error {
	data, err := statedir.Read(file, maxPlace)
	if errors.Is(err, fs.ErrNotExist) {
		// The runtime would not have been told of the hook without it: the devices left in between.
		return fmt.Errorf("the devices of the claim with uid %s are in no pod, or are just being moved", strings.TrimSuffix(filepath.Base(file), Suffix))
	}
	p := &Place{}
	if err == nil {
		err = json.Unmarshal(data, p)
	}
	if err != nil {
		return fmt.Errorf("where the devices of the claim are is not known: %s: %w", file, err)
	}
	if p.NetNS != netns || !c.isIn(p.Sandbox) {
		return fmt.Errorf("claim %s is in use by pod %s, which has the devices in another sandbox than this container's: give each pod a claim "+
			"of its own by a ResourceClaimTemplate, or have a Deployment end the old pod first (strategy Recreate); a pod whose own sandbox was "+
			"made anew has them again when the network driver's agent on the node is back", p.Claim, p.Pod)
	}
	for _, d := range p.Hardware {
		if why := d.lost(sysfsRoot); why != "" {
			return fmt.Errorf("device %s of claim %s is lost: %s; it comes back into the pod when it has an interface and the network driver's "+
				"agent on the node is at work", d.Name, p.Claim, why)
		}
	}
	return nil
}

// checkGroups says which of the groups is not the device's any more.
func checkGroups(groups []string, sysfsRoot string) error {
	for _, g := range groups {
		device, number, _ := strings.Cut(g, "=")
		link, err := os.Readlink(filepath.Join(sysfs.DeviceDir(sysfsRoot, "pci", device), "iommu_group"))
		if now := filepath.Base(link); err == nil && now != number {
			err = fmt.Errorf("its IOMMU group was %s and is %s, it was made anew", number, now)
		}
		if err != nil {
			return fmt.Errorf("device %s is lost: %w; a container has it again when the network driver's agent on the node is at work", device, err)
		}
	}
	return nil
}

// lost says why the device's interface is not in a pod any more, empty if it is in a network namespace other than the host's: the pod may
// have given it another name, or moved it on into a namespace of its own.
func (d Device) lost(sysfsRoot string) string {
	dir := sysfs.DeviceDir(sysfsRoot, d.Bus, d.Name)
	if why := sysfs.Linkless(dir); why != "" {
		return why
	}
	names, err := sysfs.Links(dir)
	switch {
	case err != nil:
		return err.Error()
	case len(names) > 0:
		return fmt.Sprintf("its interface %s is on the host; the device was made anew, or somebody has moved it there", names[0])
	}
	return ""
}

// isIn says whether the container may be one of the sandbox, as far as its runtime names that.
func (c *container) isIn(sandbox string) bool {
	for _, key := range sandboxAnnotations {
		if named, ok := c.Annotations[key]; ok && named != sandbox {
			return false
		}
	}
	return true
}
