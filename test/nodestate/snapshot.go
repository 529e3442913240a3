// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodestate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// Snapshot is what a node has when nothing is going on, as far as the driver, kubelet and the runtime have to do with it.
type Snapshot struct {
	Network Network
	// Drivers are the drivers of the VFs, by PCI address.
	Drivers map[string]string
	// Namespaces are how many named network namespaces there are, and Containers how many containers, sandboxes included.
	Namespaces, Containers int
	// Files are those of the driver, kubelet's of the driver, and the CDI folder's. Those that tell of a device are there with
	// their sums.
	Files []string
	// Prepared are the claims in kubelet's checkpoint.
	Prepared []string
	// Slices are the devices that the node offers, by pool.
	Slices map[string][]resourceapi.Device
	// Claims are the entries of the driver in the status of the claims, by claim.
	Claims map[string][]Entry
	// Rows and Journal are the agent's tables of allocations and of the journal.
	Rows, Journal []Row
}

// Entry is what a claim's status says of a device.
type Entry struct {
	Device, Data, NetworkData string
	Conditions                map[string]string
}

// Row is what a row of a table says of a device.
type Row struct {
	Device, Claim, Pod string
	// Sandbox is where the device is, if it is in one, and Error what is wrong with it.
	Sandbox, Error string
	Releasing      bool
}

// script prints parts that are apart by lines of "==".
const script = showLinks + `; echo; echo ==
for vf in /sys/class/net/*/device/virtfn*; do [ -e "$vf" ] && readlink -f "$vf" "$vf/driver"; done; echo ==
ls /run/netns 2>/dev/null | wc -l; ls /run/containerd/io.containerd.runtime.v2.task/k8s.io 2>/dev/null | wc -l; echo ==
find /run/cilium /run/cdi /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry ! -type d ! -path '*/crashpoints/*' -printf '%y %m %p\n' 2>/dev/null
sha256sum /run/cilium/networkdriver/*.json /run/cdi/*.json 2>/dev/null; echo ==
cat /var/lib/kubelet/dra_manager_state 2>/dev/null; true`

var checkpointed = regexp.MustCompile(`ClaimUID\\*":\\*"([0-9a-f-]+)`)

// Reader reads snapshots of a node.
type Reader struct {
	Client kubernetes.Interface
	Node   *lab.Node
	// Driver is the driver's name.
	Driver string
	// Socket returns the path on the node of the agent's socket, by which its tables are read.
	Socket func(context.Context) (string, error)
}

// Read reads the node. The agent has to run.
func (r *Reader) Read(ctx context.Context) (Snapshot, error) {
	s, err := readNode(ctx, r.Node)
	if err != nil {
		return Snapshot{}, err
	}
	if s.Slices, err = r.slices(ctx); err != nil {
		return Snapshot{}, err
	}
	if s.Claims, err = r.claims(ctx); err != nil {
		return Snapshot{}, err
	}
	if s.Rows, err = r.Table(ctx, "networkdriver-dra-allocations"); err != nil {
		return Snapshot{}, err
	}
	if s.Journal, err = r.Table(ctx, "networkdriver-journal"); err != nil {
		return Snapshot{}, err
	}
	return s, nil
}

func readNode(ctx context.Context, n *lab.Node) (Snapshot, error) {
	out, err := n.Run(ctx, script)
	if err != nil {
		return Snapshot{}, err
	}
	parts := strings.Split(out, "\n==\n")
	if len(parts) == 4 {
		parts = append(parts, "") // no checkpoint, and the last line's end is trimmed
		parts[3] = strings.TrimSuffix(parts[3], "\n==")
	}
	if len(parts) != 5 {
		return Snapshot{}, fmt.Errorf("node %s: %d parts instead of 5: %q", n.Name(), len(parts), out)
	}
	s := Snapshot{Drivers: map[string]string{}}
	if s.Network, err = parseLinks([]byte(parts[0])); err != nil {
		return Snapshot{}, err
	}
	vf := ""
	for _, path := range strings.Fields(parts[1]) {
		if base := path[strings.LastIndex(path, "/")+1:]; strings.Contains(path, "/drivers/") {
			s.Drivers[vf] = base
		} else {
			vf = base
			s.Drivers[vf] = ""
		}
	}
	if _, err := fmt.Sscan(parts[2], &s.Namespaces, &s.Containers); err != nil {
		return Snapshot{}, fmt.Errorf("node %s: counts %q: %w", n.Name(), parts[2], err)
	}
	s.Files = strings.Split(parts[3], "\n")
	slices.Sort(s.Files)
	for _, match := range checkpointed.FindAllStringSubmatch(parts[4], -1) {
		s.Prepared = append(s.Prepared, match[1])
	}
	slices.Sort(s.Prepared)
	s.Prepared = slices.Compact(s.Prepared)
	return s, nil
}

func (r *Reader) slices(ctx context.Context) (map[string][]resourceapi.Device, error) {
	list, err := r.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + r.Node.Name() + ",spec.driver=" + r.Driver,
	})
	if err != nil {
		return nil, err
	}
	pools := map[string][]resourceapi.Device{}
	for _, s := range list.Items {
		pools[s.Spec.Pool.Name] = append(pools[s.Spec.Pool.Name], s.Spec.Devices...)
	}
	for _, devices := range pools {
		slices.SortFunc(devices, func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
	}
	return pools, nil
}

func (r *Reader) claims(ctx context.Context) (map[string][]Entry, error) {
	list, err := r.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	claims := map[string][]Entry{}
	for _, claim := range list.Items {
		for _, d := range claim.Status.Devices {
			if d.Driver != r.Driver || !strings.HasPrefix(d.Pool, r.Node.Name()+"/") {
				continue
			}
			e := Entry{Device: d.Device, Conditions: map[string]string{}}
			if d.Data != nil {
				e.Data = string(d.Data.Raw)
			}
			if d.NetworkData != nil {
				e.NetworkData = fmt.Sprint(*d.NetworkData)
			}
			for _, c := range d.Conditions {
				e.Conditions[c.Type] = fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
			}
			name := claim.Namespace + "/" + claim.Name
			claims[name] = append(claims[name], e)
		}
	}
	return claims, nil
}

// Table reads the agent's table of allocations or of the journal.
func (r *Reader) Table(ctx context.Context, table string) ([]Row, error) {
	socket, err := r.Socket(ctx)
	if err != nil {
		return nil, err
	}
	data, err := deploy.DumpTable(ctx, r.Node, socket, table)
	if err != nil {
		return nil, err
	}
	var objects []struct {
		DeviceName, Name  string
		ClaimUID, PodUID  string
		Error, Quarantine string
		Releasing         bool
		Attachment        *struct{ SandboxID string }
	}
	if err := json.Unmarshal(data, &objects); err != nil {
		return nil, fmt.Errorf("table %s of %s: %w", table, r.Node.Name(), err)
	}
	var rows []Row
	for _, o := range objects {
		row := Row{Device: o.DeviceName + o.Name, Claim: o.ClaimUID, Pod: o.PodUID, Error: o.Error + o.Quarantine, Releasing: o.Releasing}
		if o.Attachment != nil {
			row.Sandbox = o.Attachment.SandboxID
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b Row) int { return strings.Compare(a.Device, b.Device) })
	return rows, nil
}

// Difference says what of a snapshot is not as it was before, empty for nothing.
func Difference(before, now Snapshot) string { return cmp.Diff(before, now) }

// WithoutAddresses is the snapshot without the addresses of the VFs: those that are made anew have others.
func (s Snapshot) WithoutAddresses() Snapshot {
	out := s
	out.Network = Network{Links: maps.Clone(s.Network.Links), VFs: slices.Clone(s.Network.VFs)}
	for name, link := range out.Network.Links {
		if _, vf := s.Drivers[link.Parent]; vf {
			link.MAC = ""
			out.Network.Links[name] = link
		}
	}
	for i := range out.Network.VFs {
		out.Network.VFs[i].MAC = ""
	}
	out.Slices = map[string][]resourceapi.Device{}
	for pool, devices := range s.Slices {
		for _, d := range devices {
			d.Attributes = maps.Clone(d.Attributes)
			delete(d.Attributes, "mac")
			out.Slices[pool] = append(out.Slices[pool], d)
		}
	}
	return out
}
