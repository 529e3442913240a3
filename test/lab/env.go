// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// WriteEnv writes shell commands that make kubectl and helm use the cluster.
// They put a directory with both in front of the PATH; helm is there once the
// repository's bin/helm is built.
func (l *Lab) WriteEnv(w io.Writer) error {
	kubectl, err := lookup([]string{l.arts.Bin}, "kubectl")
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	// A directory of its own, so that no other program of the lab or the repository
	// hides one of the user's. kubectl looks at the name it was called by.
	bin := filepath.Join(l.state, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for name, program := range map[string]string{"kubectl": kubectl, "helm": filepath.Join(root, "bin", "helm")} {
		if err := os.Symlink(program, filepath.Join(bin, name)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "export KUBECONFIG=%s\nexport PATH=%s:$PATH\n", quote(l.Kubeconfig()), quote(bin))
	return err
}

// quote makes one word of a string for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Logs returns the paths of the logs in the state directory by name, also of
// a lab that is down or failed to start.
func Logs(opts Options) (map[string]string, error) {
	state, err := stateDir(opts)
	if err != nil {
		return nil, err
	}
	logs := map[string]string{}
	for pattern, name := range map[string]func(path string) string{
		"control-plane/log/*.log": logName,
		"nodes/*/*.log":           func(p string) string { return filepath.Base(filepath.Dir(p)) + "/" + logName(p) },
		"nodes/*/guest/log/*.log": func(p string) string {
			return filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(p)))) + "/" + logName(p)
		},
	} {
		paths, err := filepath.Glob(filepath.Join(state, pattern))
		if err != nil {
			return nil, err
		}
		for _, p := range paths {
			logs[name(p)] = p
		}
	}
	return logs, nil
}

func logName(path string) string { return strings.TrimSuffix(filepath.Base(path), ".log") }
