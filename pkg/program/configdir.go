// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package program

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// readConfigDir reads the files of a directory whose names are known, and names those that are not. Kubernetes
// mounts a ConfigMap as links beside hidden directories, which are not looked at.
func readConfigDir(dir string, known func(name string) bool) (values map[string]any, unknown []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	values = map[string]any{}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") {
			continue
		}
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err != nil {
			return nil, nil, err
		} else if info.IsDir() {
			continue
		}
		if !known(name) {
			unknown = append(unknown, name)
			continue
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, fmt.Errorf("value of --%s: %w", name, err)
		}
		values[name] = strings.TrimSpace(string(content))
	}
	return values, unknown, nil
}
