// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package guest is what an emulated node and the lab agree on: the node's
// configuration, which the lab hands over in a shared directory, and the HTTP
// interface through which the lab acts on the node.
package guest

import (
	"encoding/json"
	"os"
)

const (
	// ConfigTag is the 9p mount tag of the node's own directory: its
	// configuration in, its logs out.
	ConfigTag = "lab"
	// ConfigDir is where the node mounts it.
	ConfigDir = "/lab"
	// ShareTag is the 9p mount tag of the lab's directory of files for all nodes.
	ShareTag = "share"
	// ShareDir is where a node mounts it, read-only.
	ShareDir = "/share"
	// ImageDir holds the container images that a node imports when it is new.
	ImageDir = "/usr/share/lab/images"
	// ModulesFile lists the kernel modules that a node loads.
	ModulesFile = "/etc/lab/modules"
	// Port is where the node's agent serves, on the management address.
	Port = 7000
	// ProbeArg on the kernel's command line makes the node say ProbeAnswer on
	// its console and power off: a test whether guests boot at all.
	ProbeArg    = "lab.probe"
	ProbeAnswer = "lab: guest boots"
)

// Config is a node's configuration.
type Config struct {
	Name string
	// The NICs are known by MAC address, since their order is not stable.
	ManagementMAC string
	Address       string // of the management NIC, with prefix length
	Gateway       string
	Uplinks       map[string]string // the SR-IOV PFs' names by MAC address

	// Files are put in place at each boot if they are missing, from files of the
	// node's directory to paths in the node.
	Files map[string]string
	// Daemons are started in this order at each boot.
	Daemons []Daemon
}

// Daemon is a background process of a node.
type Daemon struct {
	Name string
	Args []string
	Env  []string
	// Socket is a Unix socket: the daemon counts as started once it listens
	// there. Empty means at once.
	Socket string
}

// Process is the state of a daemon.
type Process struct {
	PID     int
	Running bool
	// Exit is the exit status of a daemon that ended, 128 + N if signal N
	// ended it.
	Exit int
}

// ExecRequest is the body of POST /exec: run a shell script.
type ExecRequest struct {
	Script string
	Stdin  []byte
	Env    []string
}

// Frame is one line of the answer to /exec: output as it comes, and at the end
// the exit status.
type Frame struct {
	Stdout []byte `json:",omitempty"`
	Stderr []byte `json:",omitempty"`
	Exit   *int   `json:",omitempty"`
	Error  string `json:",omitempty"`
}

// Health is the answer to GET /health.
type Health struct {
	BootID string
	Booted bool   // all daemons of the configuration are started
	Error  string // why booting failed, if it did
}

// ReadConfig reads a configuration file.
func ReadConfig(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var c Config
	return &c, json.Unmarshal(data, &c)
}
