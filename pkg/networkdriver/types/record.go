// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"encoding/json"
	"fmt"

	kubetypes "k8s.io/apimachinery/pkg/types"
)

// Versions of the record's format. Fields may be added without a new version if an agent that does not know them does
// nothing wrong; a reader refuses versions it does not know.
const (
	// RecordVersion is the version of a record without a network.
	RecordVersion = 1
	// RecordVersionNetwork is the version of one with a network: an agent that knows of none would take the device out of its VLAN.
	RecordVersionNetwork = 2
	// RecordVersionAddresses is the version of one with addresses or routes that were asked for: an agent that knows of none would give
	// the pod its device without them.
	RecordVersionAddresses = 3
	// RecordVersionDriver is the version of one with a driver: an agent that knows of none would leave it bound.
	RecordVersionDriver = 4
	// RecordVersionRDMA is the version of one with an RDMA device: an agent that knows of none would start containers without it.
	RecordVersionRDMA = 5
)

// RecordVersionOf returns the version in which a device with the configuration is recorded.
func RecordVersionOf(cfg DeviceConfig) int {
	switch {
	case cfg.RDMA:
		return RecordVersionRDMA
	case cfg.Driver != "":
		return RecordVersionDriver
	case len(cfg.Addresses) > 0 || len(cfg.Routes) > 0:
		return RecordVersionAddresses
	case cfg.Joined != nil:
		return RecordVersionNetwork
	default:
		return RecordVersion
	}
}

// Record is the durable state of one prepared device, kept in status.devices[].data of its ResourceClaim. It is
// what survives a reboot of the node, and the loss of the node's journal. Whoever may write the claim's status may forge it, so it counts only where
// it fits the claim's allocation and the device it names.
type Record struct {
	Version int `json:"version"`
	// Manager is the device manager that restores the device.
	Manager DeviceManagerType `json:"manager"`
	// PodUID is the pod that the device was prepared for.
	PodUID kubetypes.UID `json:"podUID"`
	// BootID is the kernel's boot id at Setup (/proc/sys/kernel/random/boot_id). Kernel state does not outlive it.
	BootID string `json:"bootID"`
	// Journal is the id of the node's journal that has an entry for as long as the device is set up. It is empty in records
	// of agents that kept none.
	Journal string `json:"journal,omitempty"`
	// Config is what the claim asked for.
	Config DeviceConfig `json:"config"`
	// Device is the prepared device, for the manager's RestoreDevice.
	Device json.RawMessage `json:"device"`
}

// DecodeRecord decodes a record and checks its form. Whether it is true is for the caller to check.
func DecodeRecord(raw []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(raw, &r); err != nil {
		return Record{}, fmt.Errorf("decode record: %w", err)
	}
	switch {
	case r.Version != RecordVersionOf(r.Config):
		return Record{}, fmt.Errorf("record has version %d, version %d is understood", r.Version, RecordVersionOf(r.Config))
	case r.Manager == "" || r.PodUID == "" || r.BootID == "" || len(r.Device) == 0 || string(r.Device) == "null":
		return Record{}, fmt.Errorf("record is incomplete: manager, podUID, bootID and device are needed")
	}
	if err := r.Config.Check(); err != nil {
		return Record{}, fmt.Errorf("record: config.%w", err)
	}
	return r, nil
}
