// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package counters

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// host is the kernel, asked from the host's network namespace.
type host struct{ *rtlink.Conn }

// OpenHost opens the kernel in the calling program's network namespace.
func OpenHost(log *slog.Logger) (Kernel, error) { return openIn(log, "") }

func openIn(log *slog.Logger, netns string) (Kernel, error) {
	conn, err := rtlink.DialPath(log, netns)
	if err != nil {
		return nil, err
	}
	return host{conn}, nil
}

// Link implements [Kernel].
func (h host) Link(netns string, index int) (rtlink.Counters, string, bool, error) {
	ns, err := netnamespace.Open(netns)
	if errors.Is(err, os.ErrNotExist) {
		return rtlink.Counters{}, "", false, nil // the pod ends
	}
	if err != nil {
		return rtlink.Counters{}, "", false, err
	}
	defer ns.Close()
	id, err := h.NamespaceID(ns)
	if err != nil {
		return rtlink.Counters{}, "", false, err
	}
	link, counters, err := h.Counters(id, index)
	if link == nil || err != nil {
		return rtlink.Counters{}, "", false, err
	}
	return counters, link.Attrs().ParentDev, true, nil
}

// VFs implements [Kernel].
func (h host) VFs(pf string) (map[int]rtlink.Counters, error) {
	link, err := h.ByName(pf)
	if err != nil {
		return nil, err
	}
	if link == nil {
		return nil, fmt.Errorf("there is no interface %s", pf)
	}
	return h.VFCounters(link.Attrs().Index)
}
