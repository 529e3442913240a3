// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

const (
	// DefaultNodeConfig is beside the runtime's directory of network configurations, not in it.
	DefaultNodeConfig = "/etc/cni/amd-host-device.json"
	// maxNodeConfigSize is far beyond what the file needs.
	maxNodeConfigSize = 1 << 20
)

// nodeConfig is what the node's administrator decides, and not whoever may write network configurations: the plugin does
// as root what it is told.
type nodeConfig struct {
	// AllowNodeNetwork lets network configurations that ask for it move NICs that the node itself needs.
	AllowNodeNetwork bool `json:"allowNodeNetwork"`
	// StateDir is where attachments are recorded.
	StateDir string `json:"stateDir"`
	// LogFiles are patterns of [path.Match], in which * does not match a slash. A log file has to match one of them.
	LogFiles []string `json:"logFiles"`

	// file is where it is from, or would be.
	file string
}

// readNodeConfig reads the node's file. One that is not there has its defaults; one that others may write decides nothing.
func readNodeConfig(file string) (*nodeConfig, error) {
	n := &nodeConfig{StateDir: defaultStateDir, LogFiles: []string{"/var/log/" + Name + "*.log"}, file: file}
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the node's file: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("the node's file %s: %w", file, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return nil, fmt.Errorf("the node's file %s has mode %#o and owner %d: needed is a regular file of user %d that nobody else may write to",
			file, st.Mode, st.Uid, os.Geteuid())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxNodeConfigSize))
	if err == nil {
		err = n.decode(data)
	}
	if err != nil {
		return nil, fmt.Errorf("the node's file %s: %w", file, err)
	}
	return n, nil
}

// decode reads the fields that are there and keeps what the others have.
func (n *nodeConfig) decode(data []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(n); err != nil {
		return fmt.Errorf("%w; allowed are the fields %s, %s and logFiles", err, fieldAllow, fieldStateDir)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the object")
	}
	if dir := n.StateDir; !path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" {
		return fmt.Errorf("%s is %q: allowed is an absolute path without . and .. in it", fieldStateDir, dir)
	}
	for _, pattern := range n.LogFiles {
		if _, err := path.Match(pattern, ""); err != nil || !path.IsAbs(pattern) || path.Ext(pattern) != ".log" {
			return fmt.Errorf("logFiles has %q: allowed are absolute paths that end in .log, with * for a part of a name", pattern)
		}
	}
	return nil
}

// allowsLog says whether the file, a clean path, may be written as a log. What is there already must be a file, not a way
// to another one.
func (n *nodeConfig) allowsLog(file string) bool {
	for _, pattern := range n.LogFiles {
		if match, _ := path.Match(pattern, file); match { // the pattern was checked
			info, err := os.Lstat(file)
			return errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().IsRegular()
		}
	}
	return false
}
