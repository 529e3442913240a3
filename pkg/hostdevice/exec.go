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

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// executor runs sub-plugins. They inherit the file of a lock: as long as one of them lives, the lock is held.
type executor struct {
	version.PluginDecoder
	path string   // CNI_PATH
	file *os.File // nil: nothing to inherit
}

var _ invoke.Exec = &executor{}

// FindInPath implements [invoke.Exec].
func (e *executor) FindInPath(plugin string, _ []string) (string, error) {
	path, err := invoke.FindInPath(plugin, filepath.SplitList(e.path))
	if err != nil {
		return "", errorf(types.ErrPluginNotAvailable, "%w", err)
	}
	return path, nil
}

// ExecPlugin implements [invoke.Exec].
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = environ
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if e.file != nil {
		cmd.ExtraFiles = []*os.File{e.file}
	}
	if err := cmd.Run(); err != nil {
		failure := &types.Error{}
		if json.Unmarshal(stdout.Bytes(), failure) != nil || failure.Msg == "" {
			failure = types.NewError(types.ErrInternal, strings.TrimSpace(stderr.String()), "")
		}
		return nil, fmt.Errorf("%s: %w (%w)", path, failure, err)
	}
	_, _ = stderr.WriteTo(os.Stderr) // for people only
	return stdout.Bytes(), nil
}
