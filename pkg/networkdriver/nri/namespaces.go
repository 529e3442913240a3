// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/nri/pkg/api"
)

// errHostNetwork refuses a pod on the host network: attaching to it would rename and move the node's own interfaces.
var errHostNetwork = errors.New("the pod runs on the host network, where a device cannot be attached; " +
	"remove hostNetwork or the claim from the pod")

// namespaces tells the network namespaces of pods from the host's.
type namespaces struct {
	host os.FileInfo
}

// hostNamespaces takes the namespace of the process for the host's. It is asked for once, since a thread may be in a
// pod's namespace later on.
func hostNamespaces() (namespaces, error) {
	host, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return namespaces{}, fmt.Errorf("look up the host's network namespace: %w", err)
	}
	return namespaces{host}, nil
}

// ofPod returns the path of the pod's network namespace.
func (n namespaces) ofPod(pod *api.PodSandbox) (string, error) {
	path := ""
	for _, ns := range pod.GetLinux().GetNamespaces() {
		if ns.GetType() == "network" {
			path = ns.GetPath()
		}
	}
	if path == "" {
		return "", errHostNetwork
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("network namespace %s of the pod is gone", path)
	case err != nil:
		return "", fmt.Errorf("network namespace of the pod: %w", err)
	case os.SameFile(info, n.host):
		return "", errHostNetwork
	}
	return path, nil
}
