// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/pkg/networkdriver/metadata"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
)

// pluginDir outlives the boot.
func (s *sim) pluginDir() string   { return s.dir + "-plugin" }
func (s *sim) metadataDir() string { return filepath.Join(s.pluginDir(), "dra-device-metadata") }

func (s *sim) metadataFolder(claim string) string {
	return filepath.Join(s.metadataDir(), podsNamespace+"_"+claim)
}

func (s *sim) metadataSpec(claim kubetypes.UID, request string) string {
	return filepath.Join(s.cdiDir(), fmt.Sprintf("%s_metadata_%s_%s.json", driverName, claim, request))
}

func metadataID(claim kubetypes.UID, request string) string {
	return fmt.Sprintf("%s/metadata=%s_%s", driverName, claim, request)
}

// describe does what the plugin, and package kubeletplugin before it answers kubelet, do so that the claim's pods read what they have.
func (a *agent) describe(ctx context.Context, claim *resourceapi.ResourceClaim, devices []kubeletplugin.Device) error {
	s := a.sim
	s.do(&call{process: a.process, key: "complete claim " + claim.Name, effect: func() { a.metadata.Complete(claim.UID, devices) }})
	for i, d := range devices {
		var err error
		what := "write metadata of claim " + claim.Name + " " + d.Requests[0]
		s.do(&call{process: a.process, key: what, takes: span{10 * time.Microsecond, time.Millisecond}, effect: func() {
			if err = a.writeMetadata(claim, d.Requests[0], devices[i:i+1]); s.chance(s.faults.disk) {
				err = fmt.Errorf("injected: %w", syscall.ENOSPC)
			}
		}})
		if err != nil {
			return err
		}
	}
	return a.preparer.Redescribe(withActor(ctx, actorOf(ctx)+" "+claim.Name), claim.UID)
}

// writeMetadata writes the files of a request in the form that kubeletplugin has them, which does it behind a server only.
func (a *agent) writeMetadata(claim *resourceapi.ResourceClaim, request string, devices []kubeletplugin.Device) error {
	ops, path := a.metadata.Operations(), filepath.Join(a.sim.metadataFolder(claim.Name), request, "metadata.json")
	said := v1beta1.DeviceMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: "DeviceMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, Generation: 1},
		Requests:   []v1beta1.DeviceMetadataRequest{{Name: request}},
	}
	for _, d := range devices {
		m := v1beta1.Device{Driver: driverName, Pool: d.PoolName, Name: d.DeviceName}
		if d.Metadata != nil {
			m.NetworkData, m.Attributes = d.Metadata.NetworkData, map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
			for name, value := range d.Metadata.Attributes {
				m.Attributes[resourceapi.QualifiedName(name)] = value
			}
		}
		said.Requests[0].Devices = append(said.Requests[0].Devices, m)
	}
	spec := specs.Spec{Version: "0.5.0", Kind: driverName + "/metadata", Devices: []specs.Device{{
		Name: string(claim.UID) + "_" + request,
		ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{{
			HostPath: path, ContainerPath: "/var/run/kubernetes.io/dra-device-attributes/" + request, Options: []string{"ro", "bind"},
		}}},
	}}}
	for _, folder := range []string{filepath.Dir(path), a.sim.cdiDir()} {
		if err := ops.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	if err := ops.WriteFile(path, must(json.Marshal(said)), 0o644); err != nil {
		return err
	}
	return ops.WriteFile(a.sim.metadataSpec(claim.UID, request), must(json.Marshal(spec)), 0o644)
}

// removeMetadata is what kubeletplugin does when the plugin has unprepared the claim.
func (a *agent) removeMetadata(claim *claimInfo) error {
	ops := a.metadata.Operations()
	if err := ops.RemoveAll(a.sim.metadataFolder(claim.name)); err != nil {
		return err
	}
	left, err := ops.Glob(a.sim.metadataSpec(claim.uid, "*"))
	for _, path := range left {
		if err == nil {
			err = ops.Remove(path)
		}
	}
	return err
}

// readAll is what a container reads that is started with the mounts.
func readAll(mounts []*specs.Mount) (devices []v1beta1.Device, err error) {
	for _, m := range mounts {
		data, err := os.ReadFile(m.HostPath)
		if err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.HostPath, err)
		}
		var said v1beta1.DeviceMetadata
		if err := json.Unmarshal(data, &said); err != nil {
			return nil, err
		}
		for _, r := range said.Requests {
			devices = append(devices, r.Devices...)
		}
	}
	return devices, nil
}

// checkRead: what a container reads of the claim's devices is how it has them.
func (s *sim) checkRead(ctr *container, c *claim, read []v1beta1.Device) {
	for i, device := range c.devices() {
		v := s.kernel.vf(device)
		at := slices.IndexFunc(read, func(d v1beta1.Device) bool { return d.Name == device && d.Pool == pools.Name(nodeName, poolName) })
		if at < 0 {
			s.fail("container %s of pod %s was started and reads nothing of %s of claim %s", ctr.name, ctr.sandbox.pod.name, v, c.name)
			return
		}
		if c.driver == "" && v.netns != ctr.sandbox.netns {
			continue // the pod has made something else of it
		}
		said, want := read[at], ""
		if c.driver == "" {
			var addresses []string
			for _, a := range v.addresses {
				addresses = append(addresses, a.String())
			}
			want = fmt.Sprint(c.ifName(i), v.mac, addresses)
		}
		got := ""
		if n := said.NetworkData; n != nil {
			got = fmt.Sprint(n.InterfaceName, n.HardwareAddress, n.IPs)
		}
		vlan := said.Attributes[metadata.AttributeVLAN].IntValue
		if got != want || c.driver == "" && (vlan == nil || int(*vlan) != c.vlan) {
			s.fail("container %s of pod %s was started and reads of %s of claim %s, which is %s: %s, %v",
				ctr.name, ctr.sandbox.pod.name, v, c.name, want, got, vlan)
		}
	}
}

// leftMetadata returns what is there of claims that are not.
func (s *sim) leftMetadata() (left []string) {
	folders, _ := os.ReadDir(s.metadataDir())
	for _, f := range folders {
		if !slices.ContainsFunc(s.api.sortedClaims(), func(c *claim) bool { return f.Name() == filepath.Base(s.metadataFolder(c.name)) }) {
			left = append(left, f.Name())
		}
	}
	files, _ := filepath.Glob(s.metadataSpec("*", "*"))
	for _, path := range files {
		if !slices.ContainsFunc(s.api.sortedClaims(), func(c *claim) bool {
			return strings.HasPrefix(path, strings.TrimSuffix(s.metadataSpec(c.uid, ""), ".json"))
		}) {
			left = append(left, path)
		}
	}
	return left
}
