// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// executor runs sub-plugins with the environment that the runtime gave. They inherit the file of a lock: as long as one
// of them lives, the lock is held. The library's own way of running them brings an HTTP stack into a program that
// starts and ends all the time, and lets nothing be inherited.
type executor struct {
	path string   // CNI_PATH
	file *os.File // nil: nothing to inherit
}

// find returns where a plugin is.
func (e executor) find(plugin string) (string, error) {
	if plugin == "" || strings.ContainsRune(plugin, filepath.Separator) {
		return "", errorf(types.ErrInvalidNetworkConfig, "%.64q is not the name of a plugin", plugin)
	}
	for _, dir := range filepath.SplitList(e.path) {
		path := filepath.Join(dir, plugin)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", errorf(types.ErrPluginNotAvailable, "plugin %q is not in CNI_PATH %s", plugin, e.path)
}

// run calls a plugin with a verb and returns what it printed. The error has the plugin's code and message.
func (e executor) run(ctx context.Context, verb, plugin string, conf []byte) ([]byte, error) {
	path, err := e.find(plugin)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb) // the last value counts
	cmd.Stdin = bytes.NewReader(conf)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if e.file != nil {
		cmd.ExtraFiles = []*os.File{e.file}
	}
	if err := cmd.Run(); err != nil {
		failure := &types.Error{}
		if json.Unmarshal(stdout.Bytes(), failure) != nil || failure.Msg == "" {
			failure = types.NewError(types.ErrInternal, strings.TrimSpace(stderr.String()), "")
		}
		return nil, fmt.Errorf("%s of plugin %s: %w (%w)", verb, path, failure, err)
	}
	_, _ = stderr.WriteTo(os.Stderr) // for people only
	return stdout.Bytes(), nil
}
