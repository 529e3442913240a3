// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/truncate"
)

const (
	// conditionReady is the condition of a device: true while its link is in the pod, or while it is set up if it has none.
	conditionReady = "Ready"
	// conditionHealthy is the condition of a device without faults. Its reason is the heaviest fault's cause, or the type for none.
	conditionHealthy = "Healthy"
	// maxMessageLen keeps a condition's message readable; the API allows 32 KiB.
	maxMessageLen = 1024
)

// deviceStatus is what one entry of a claim's status.devices says, apart from when its condition changed.
type deviceStatus struct {
	Pool   string // as published
	Device string
	// Data is the record as JSON with sorted keys, which is how the API server gives it back.
	Data    string
	Ready   metav1.ConditionStatus
	Reason  string
	Message string
	Health  deviceHealth
	IfName  string
	MAC     string
	IPs     []string
}

// deviceHealth is what the condition of the device's health says; without a status there is none.
type deviceHealth struct {
	Status  metav1.ConditionStatus
	Reason  string
	Message string
}

func healthOf(h *tables.DeviceHealth) deviceHealth {
	if h == nil {
		return deviceHealth{metav1.ConditionTrue, conditionHealthy, ""}
	}
	return deviceHealth{metav1.ConditionFalse, h.Causes()[0], truncate.UTF8(h.Message(), maxMessageLen)}
}

func (s *deviceStatus) key() string { return s.Pool + "/" + s.Device }

// statusesOf returns what the claim's status is to say about the rows, sorted.
func statusesOf(rows []*tables.DRAAllocation, nodeName, bootID, journal string) ([]deviceStatus, error) {
	statuses := make([]deviceStatus, 0, len(rows))
	for _, row := range rows {
		s, err := statusOf(row, nodeName, bootID, journal)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", row.DeviceName, err)
		}
		statuses = append(statuses, s)
	}
	sortStatuses(statuses)
	return statuses, nil
}

func sortStatuses(statuses []deviceStatus) {
	slices.SortFunc(statuses, func(a, b deviceStatus) int { return cmp.Compare(a.key(), b.key()) })
}

func statusOf(row *tables.DRAAllocation, nodeName, bootID, journal string) (deviceStatus, error) {
	device, err := row.PreparedDevice.MarshalJSON()
	if err != nil {
		return deviceStatus{}, fmt.Errorf("encode the device for its record: %w", err)
	}
	record, err := json.Marshal(types.Record{
		Version: types.RecordVersionOf(row.Config),
		Manager: row.Manager,
		PodUID:  row.PodUID,
		BootID:  bootID,
		Journal: journal,
		Config:  row.Config,
		Device:  device,
	})
	if err != nil {
		return deviceStatus{}, fmt.Errorf("encode the record: %w", err)
	}
	if len(record) > resourceapi.AllocatedDeviceStatusDataMaxLength {
		return deviceStatus{}, fmt.Errorf("the record has %d bytes, a claim's status holds at most %d for a device",
			len(record), resourceapi.AllocatedDeviceStatusDataMaxLength)
	}
	s := deviceStatus{
		Pool:   pools.Name(nodeName, row.Pool),
		Device: row.DeviceName,
		Data:   sortedKeys(record),
		Ready:  metav1.ConditionFalse,
		Reason: row.State(),
	}
	switch a := row.Attachment; {
	case a != nil && a.Moved:
		s.Ready = metav1.ConditionTrue
		s.Message = "the pod has moved the interface into a network namespace of its own"
	case a != nil && a.IfName != "":
		s.Ready = metav1.ConditionTrue
		s.Message = fmt.Sprintf("interface %s is in the pod", a.IfName)
		if a.Again {
			s.Message += " again, after it was gone from there: addresses and routes that it had are lost"
		}
		if n := row.Config.Joined; n != nil && n.Lacks != "" {
			s.Message += fmt.Sprintf(", without an %s address: network %s has no subnet of that family for this node", n.Lacks, row.Config.Network)
		}
	case row.PreparedDevice.Link().IsZero():
		s.Ready = metav1.ConditionTrue
		s.Message = "set up; the device has no network interface that could be moved into the pod"
	default:
		s.Message = "set up, and waiting for the pod's sandbox"
	}
	if row.Error != "" {
		s.Ready = metav1.ConditionFalse
		s.Message = row.Error
	}
	s.Message = truncate.UTF8(s.Message, maxMessageLen)
	if row.Attachment != nil {
		if n := row.Attachment.NetworkData(); n != nil {
			s.IfName, s.MAC, s.IPs = n.InterfaceName, n.HardwareAddress, n.IPs
		}
	}
	return s, nil
}

// sortedKeys returns the JSON object with sorted keys and without blanks, for comparison; what is no JSON stays.
func sortedKeys(raw []byte) string {
	var v any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		return string(raw)
	}
	sorted, err := json.Marshal(v)
	if err != nil {
		return string(raw)
	}
	return string(sorted)
}

// statusesIn returns what the owner's among the entries of a claim's status say, and since when.
func statusesIn(entries []resourceapi.AllocatedDeviceStatus, owner Owner) ([]deviceStatus, transitions) {
	var statuses []deviceStatus
	since := transitions{}
	for _, entry := range entries {
		if !owner.owns(entry) {
			continue
		}
		s := deviceStatus{Pool: entry.Pool, Device: entry.Device}
		if entry.Data != nil {
			s.Data = sortedKeys(entry.Data.Raw)
		}
		for _, c := range entry.Conditions {
			switch c.Type {
			case conditionReady:
				s.Ready, s.Reason, s.Message = c.Status, c.Reason, c.Message
			case conditionHealthy:
				s.Health = deviceHealth{c.Status, c.Reason, c.Message}
			default:
				continue
			}
			since[s.key()+"/"+c.Type] = transition{c.Status, c.LastTransitionTime}
		}
		if n := entry.NetworkData; n != nil {
			s.IfName, s.MAC, s.IPs = n.InterfaceName, n.HardwareAddress, n.IPs
		}
		statuses = append(statuses, s)
	}
	sortStatuses(statuses)
	return statuses, since
}

// transition is the last change of a device's condition.
type transition struct {
	status metav1.ConditionStatus
	at     metav1.Time
}

// transitions are by the devices' keys and the conditions' types.
type transitions map[string]transition

// conditions returns the status of each of a device's conditions.
func (s *deviceStatus) conditions() map[string]metav1.ConditionStatus {
	conditions := map[string]metav1.ConditionStatus{conditionReady: s.Ready}
	if s.Health.Status != "" {
		conditions[conditionHealthy] = s.Health.Status
	}
	return conditions
}

// transitionsOf returns since when the devices are in their state: unchanged where the condition is.
func transitionsOf(statuses []deviceStatus, before transitions, now time.Time) transitions {
	after := make(transitions, 2*len(statuses))
	for _, s := range statuses {
		for condition, status := range s.conditions() {
			t, known := before[s.key()+"/"+condition]
			if !known || t.status != status {
				t = transition{status, metav1.NewTime(now.Truncate(time.Second))}
			}
			after[s.key()+"/"+condition] = t
		}
	}
	return after
}

// applyConfigOf builds the server-side-apply configuration with the statuses as entries of the claim's status. The
// UID in it keeps a new claim of the same name from being written.
func applyConfigOf(claim Ref, driver string, statuses []deviceStatus, since transitions) *resourceapply.ResourceClaimApplyConfiguration {
	status := resourceapply.ResourceClaimStatus()
	for _, s := range statuses {
		entry := resourceapply.AllocatedDeviceStatus().
			WithDriver(driver).
			WithPool(s.Pool).
			WithDevice(s.Device).
			WithData(runtime.RawExtension{Raw: []byte(s.Data)}).
			WithConditions(metaapply.Condition().
				WithType(conditionReady).
				WithStatus(s.Ready).
				WithReason(s.Reason).
				WithMessage(s.Message).
				WithLastTransitionTime(since[s.key()+"/"+conditionReady].at))
		if s.Health.Status != "" {
			entry.WithConditions(metaapply.Condition().
				WithType(conditionHealthy).
				WithStatus(s.Health.Status).
				WithReason(s.Health.Reason).
				WithMessage(s.Health.Message).
				WithLastTransitionTime(since[s.key()+"/"+conditionHealthy].at))
		}
		if s.IfName != "" || s.MAC != "" || len(s.IPs) > 0 {
			network := resourceapply.NetworkDeviceData()
			if s.IfName != "" {
				network.WithInterfaceName(s.IfName)
			}
			if s.MAC != "" {
				network.WithHardwareAddress(s.MAC)
			}
			entry.WithNetworkData(network.WithIPs(s.IPs...))
		}
		status.WithDevices(entry)
	}
	return resourceapply.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
}
