// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/nodeconfig"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Reasons of the conditions Ready and Degraded.
const (
	reasonServing            = "Serving"
	reasonStarting           = "Starting"
	reasonInvalidConfig      = "InvalidConfig"
	reasonKubernetesVersion  = "UnsupportedKubernetes"
	reasonRestoring          = "Restoring"
	reasonDiscovering        = "Discovering"
	reasonWaitingForNRI      = "WaitingForNRI"
	reasonRegistering        = "Registering"
	reasonRegistrationFailed = "RegistrationFailed"
	reasonPublicationFailed  = "PublicationFailed"

	reasonAsConfigured     = "AsConfigured"
	reasonRestartRequired  = "RestartRequired"
	reasonConfigNotMet     = "ConfigNotMet"
	reasonPoolConflict     = "PoolConflict"
	reasonNotRepresentable = "NotRepresentable"
	reasonDeviceFailed     = "DeviceFailed"
)

// problem is one reason for a condition, with its message.
type problem struct{ reason, message string }

// view is what the node config's status is made of.
type view struct {
	// generation is the node config's that the rest speaks of.
	generation int64
	driverName string
	// notReady are the reasons for not serving, the first cause first.
	notReady []problem
	// degraded are the parts that do not work while the rest does.
	degraded []problem

	reports     []*inventory.Report
	allocations []*tables.DRAAllocation
	// pools are the configured pools' names.
	pools []string
	// advertised counts the devices that each pool advertises.
	advertised map[string]int
}

// status makes the node config's status. The writer sorts and bounds its lists.
func (v view) status() v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	s := v2alpha1.CiliumNetworkDriverNodeConfigStatus{
		ObservedGeneration: v.generation,
		DriverName:         v.driverName,
		AllocatedDevices:   int32(len(v.allocations)),
	}
	degraded := slices.Clone(v.degraded)
	for _, r := range v.reports {
		s.Managers = append(s.Managers, v2alpha1.DeviceManagerStatus{
			Manager: r.Manager.String(), Devices: int32(r.Devices), Skipped: int32(len(r.Skipped)),
		})
		s.SkippedDevices = append(s.SkippedDevices, skippedDevices(r)...)
		for _, p := range r.Problems {
			degraded = append(degraded, problem{reasonConfigNotMet, p.Field + ": " + p.Message})
		}
	}
	for _, a := range v.allocations {
		if a.Error != "" {
			degraded = append(degraded, problem{reasonDeviceFailed,
				fmt.Sprintf("device %s of claim %s: %s", a.DeviceName, a.Claim(), a.Error)})
		}
	}
	s.Pools = v.poolStatus()
	for _, p := range s.Pools {
		s.Devices += p.Devices
	}

	ready := problem{reasonServing, fmt.Sprintf("%d devices are offered in %d pools", s.Devices, len(v.advertised))}
	if len(v.notReady) > 0 {
		ready = v.notReady[0]
	}
	s.Conditions = []metav1.Condition{
		nodeconfig.Condition(v2alpha1.ConditionReady, len(v.notReady) == 0, ready.reason, ready.message),
		degradedCondition(degraded),
	}
	return s
}

// maxDeviceName is the longest name that the API takes for a skipped device.
const maxDeviceName = 63

// skippedDevices lists each skipped device once, as the API's list is keyed by it. A name that is skipped for being
// too long is cut.
func skippedDevices(r *inventory.Report) []v2alpha1.SkippedDevice {
	seen := map[string]bool{}
	var list []v2alpha1.SkippedDevice
	for _, d := range r.Skipped {
		name := strings.ToValidUTF8(d.Device[:min(len(d.Device), maxDeviceName)], "")
		if name == "" || seen[name] {
			continue
		}
		seen[name] = true
		list = append(list, v2alpha1.SkippedDevice{Manager: r.Manager.String(), Device: name, Reason: d.Reason})
	}
	return list
}

// degradedCondition has the reason of the first problem and the messages of all.
func degradedCondition(problems []problem) metav1.Condition {
	if len(problems) == 0 {
		return nodeconfig.Condition(v2alpha1.ConditionDegraded, false, reasonAsConfigured, "all of the configuration is applied")
	}
	messages := make([]string, len(problems))
	for i, p := range problems {
		messages[i] = p.message
	}
	return nodeconfig.Condition(v2alpha1.ConditionDegraded, true, problems[0].reason, strings.Join(messages, "; "))
}

// poolStatus counts the devices of configured pools, and of former ones that still have devices.
func (v view) poolStatus() []v2alpha1.DevicePoolStatus {
	counts := map[string]*v2alpha1.DevicePoolStatus{}
	pool := func(name string) *v2alpha1.DevicePoolStatus {
		if counts[name] == nil {
			counts[name] = &v2alpha1.DevicePoolStatus{Name: name}
		}
		return counts[name]
	}
	for _, name := range v.pools {
		pool(name)
	}
	for name, n := range v.advertised {
		pool(name).Devices = int32(n)
	}
	for _, a := range v.allocations {
		pool(a.Pool).Allocated++
	}
	list := make([]v2alpha1.DevicePoolStatus, 0, len(counts))
	for _, p := range counts {
		list = append(list, *p)
	}
	slices.SortFunc(list, func(a, b v2alpha1.DevicePoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
