// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const (
	// lastConfigFile has what the driver was last configured by. Its name is not that of a device's entry.
	lastConfigFile = "config"
	// maxLastConfig is more than the API server stores for one object.
	maxLastConfig = 4 << 20
)

// LastConfig is what the driver knew of its node from the API server.
type LastConfig struct {
	Version int `json:"version"`
	// Config is the node config that was at work, without its status.
	Config *v2alpha1.CiliumNetworkDriverNodeConfig `json:"config"`
	// Addresses are those of the Node: a device that has one is never given away.
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// SaveConfig keeps the node config that is at work, nil for none, and the Node's addresses, so that an agent which is started
// while the API server is away serves the pods that have devices.
func (j *Journal) SaveConfig(config *v2alpha1.CiliumNetworkDriverNodeConfig, addresses []netip.Addr) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	path := filepath.Join(j.Dir, lastConfigFile)
	if config == nil {
		if err := statedir.Remove(path); err != nil {
			return fmt.Errorf("remove the last node config %s: %w", path, err)
		}
		return nil
	}
	kept := &v2alpha1.CiliumNetworkDriverNodeConfig{
		ObjectMeta: metav1.ObjectMeta{Name: config.Name, UID: config.UID, Generation: config.Generation}, Spec: config.Spec,
	}
	data, err := json.Marshal(LastConfig{version, kept, addresses})
	if err == nil && len(data) > maxLastConfig {
		err = fmt.Errorf("it has %d bytes, at most %d are allowed", len(data), maxLastConfig)
	}
	if err == nil {
		err = statedir.Write(path, data)
	}
	if err != nil {
		return fmt.Errorf("write the last node config %s, without which an agent that is started while the API server is away serves nobody; "+
			"make sure that there is space and that %s can be written: %w", path, j.Dir, err)
	}
	return nil
}

// LastConfig returns what [Journal.SaveConfig] kept, nil for nothing. Fields that this version does not know are left out, as
// the API server does.
func (j *Journal) LastConfig() (*LastConfig, error) {
	path := filepath.Join(j.Dir, lastConfigFile)
	data, err := statedir.Read(path, maxLastConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	last := &LastConfig{}
	if err == nil {
		err = json.Unmarshal(data, last)
	}
	switch {
	case err != nil:
	case last.Version != version:
		err = fmt.Errorf("version: %d is not %d", last.Version, version)
	case last.Config == nil || last.Config.Name != j.NodeName:
		err = fmt.Errorf("config: is not that of node %s", j.NodeName)
	}
	if err != nil {
		return nil, fmt.Errorf("read the last node config %s: %w", path, err)
	}
	return last, nil
}
