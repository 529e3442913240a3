// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// addresses returns the link's addresses with their prefix length. Those of link scope say nothing: the kernel makes
// them up by itself.
func (s *side) addresses(index int) ([]string, error) {
	var msgs [][]byte
	err := rtlink.Dump(func() (err error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfAddrmsg(unix.AF_UNSPEC))
		msgs, err = s.Execute(req, unix.RTM_NEWADDR)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var ips []string
	for _, m := range msgs {
		info := nl.DeserializeIfAddrmsg(m)
		if int(info.Index) != index || info.Scope == unix.RT_SCOPE_LINK {
			continue
		}
		attrs, err := rtlink.Attributes(m[info.Len():])
		if err != nil {
			return nil, fmt.Errorf("list addresses: %w", err)
		}
		// IFA_LOCAL is the own address and IFA_ADDRESS the peer's on a point-to-point link; IPv6 has only the latter.
		var local, address net.IP
		for _, a := range attrs {
			switch a.Attr.Type {
			case unix.IFA_LOCAL:
				local = a.Value
			case unix.IFA_ADDRESS:
				address = a.Value
			}
		}
		if local == nil {
			local = address
		}
		ips = append(ips, fmt.Sprintf("%s/%d", local, info.Prefixlen))
	}
	return ips, nil
}
