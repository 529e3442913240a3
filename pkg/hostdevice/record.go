// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecordSize is far beyond what a NIC with hundreds of addresses needs.
	maxRecordSize = 4 << 20
	// abandoned is after what time a file that is written in a moment belongs to nobody.
	abandoned  = time.Hour
	bootIDPath = "/proc/sys/kernel/random/boot_id"
)

// record is what is remembered of an attachment from before its NIC moves until the NIC is home again.
type record struct {
	Version     int    `json:"version"`
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	// BootID is of the boot that the record was made in: no NIC is in a pod after a reboot.
	BootID string `json:"bootID"`
	// Recorded is when the state was read, in seconds since the boot.
	Recorded int64 `json:"recorded"`
	// NetNS is the path of the pod's namespace, and NetNSID which one that was.
	NetNS   string          `json:"netns"`
	NetNSID netnamespace.ID `json:"netnsID"`
	NIC     nic.Identity    `json:"nic"`
	// PodIndex is the interface index that a NIC without hardware has in the pod, which can change all else that tells it
	// from others. Zero if it is not known: earlier versions did not record it.
	PodIndex int `json:"podIndex,omitempty"`
	// VFPermMAC is the permanent MAC of a VF. It does not count in NIC, but stands there in the file, since earlier versions
	// compare it and would not find the NIC after a downgrade.
	VFPermMAC string    `json:"vfPermanentMAC,omitempty"`
	State     hostState `json:"state"`
	// Settings are what ethtool(8) sets of the NIC. Earlier versions did not record them.
	Settings nic.Settings `json:"settings,omitzero"`
	// Routes are the policy routes that were asked for.
	Routes []recordedRoute `json:"routes,omitempty"`
	// Refusals counts how often the NIC was on the host and could not be made what it was.
	Refusals int `json:"refusals,omitempty"`
}

// hostState is what a NIC has on the host, and gets back.
type hostState struct {
	nic.State
	// Addresses are in the kernel's order: the first of an IPv4 network is its primary one.
	Addresses []address `json:"addresses,omitempty"`
}

// readState reads what a NIC has.
func readState(in *nic.Place, link netlink.Link) (hostState, error) {
	addrs, err := addressesOf(in, link.Attrs().Index)
	return hostState{State: nic.Read(link), Addresses: addrs}, err
}

// validate refuses what the kernel could not have reported, and what a record cannot hold.
func (st hostState) validate() error {
	if st.Name == "" {
		return errors.New("name: must not be empty")
	}
	if err := st.State.Validate(); err != nil {
		return err
	}
	for _, a := range st.Addresses {
		if err := a.validate(); err != nil {
			return err
		}
	}
	return nil
}

// recordedRoute is a route for traffic from an address.
type recordedRoute struct {
	From netip.Addr   `json:"from"`
	Dst  netip.Prefix `json:"dst"`
	Via  netip.Addr   `json:"via"`
}

// attachment names an attachment: the runtime gives each interface of a container once.
type attachment struct{ containerID, ifName string }

// file is the name of the attachment's record. The specification allows no @ in a container's ID.
func (a attachment) file() string { return a.containerID + "@" + a.ifName + recordSuffix }

func (r *record) attachment() attachment { return attachment{r.ContainerID, r.IfName} }

// setNIC records the link that a place identifies so.
func (r *record) setNIC(id nic.Identity, link netlink.Link) {
	r.NIC = id
	if id.Physical() && id.PermMAC == "" {
		r.VFPermMAC = link.Attrs().PermHWAddr.String()
	}
}

// encode returns what [decodeRecord] and earlier versions read.
func (r *record) encode() ([]byte, error) {
	out := *r
	out.NIC.PermMAC = cmp.Or(r.NIC.PermMAC, r.VFPermMAC)
	return json.Marshal(out)
}

// elapsed is how many seconds ago the NIC's state was read.
func (r *record) elapsed(now int64) uint32 {
	return uint32(min(max(now-r.Recorded, 0), int64(forever-1)))
}

// decodeRecord reads a record that may have been torn or written by others.
func decodeRecord(data []byte) (*record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("version %d is not %d", r.Version, recordVersion)
	}
	if err := utils.ValidateContainerID(r.ContainerID); err != nil {
		return nil, err
	}
	if err := utils.ValidateInterfaceName(r.IfName); err != nil {
		return nil, err
	}
	if r.NIC.Name == "" || r.BootID == "" {
		return nil, errors.New("the NIC or the boot is missing")
	}
	if err := r.State.validate(); err != nil {
		return nil, fmt.Errorf("state of the NIC: %w", err)
	}
	if err := r.Settings.Validate(); err != nil {
		return nil, fmt.Errorf("settings of the NIC: %w", err)
	}
	if r.VFPermMAC != "" {
		r.NIC.PermMAC = ""
	}
	if r.State.Alias == nil {
		// Earlier versions left out an empty one.
		r.State.Alias = new(string)
	}
	return &r, nil
}

// store keeps one record per attachment in a directory, each in a file of its own, so that a broken one harms no other.
type store struct{ dir string }

func openStore(dir string) (*store, error) {
	s := &store{dir: dir}
	for _, d := range []string{s.records(), s.locks()} {
		if err := statedir.Make(d); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *store) records() string { return filepath.Join(s.dir, "attachments") }
func (s *store) locks() string   { return filepath.Join(s.dir, "locks") }

func (s *store) path(a attachment) string { return filepath.Join(s.records(), a.file()) }

// load returns the attachment's record, nil if there is none.
func (s *store) load(a attachment) (*record, error) {
	data, err := statedir.Read(s.path(a), maxRecordSize)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, statedir.ErrNotFile):
		err = &brokenError{file: s.path(a), err: err}
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of container %s, interface %s: %w", a.containerID, a.ifName, err)
	}
	r, err := decodeRecord(data)
	if err == nil && r.attachment() != a {
		err = errors.New("it is of another attachment")
	}
	if err != nil {
		return nil, &brokenError{file: s.path(a), err: err}
	}
	return r, nil
}

// brokenError says that a record's content is not one.
type brokenError struct {
	file string
	err  error
}

func (e *brokenError) Error() string { return fmt.Sprintf("record %s is broken: %v", e.file, e.err) }
func (e *brokenError) Unwrap() error { return e.err }

// list returns all records that can be read, and what is wrong with the others.
func (s *store) list() (records []*record, broken []error, err error) {
	entries, err := os.ReadDir(s.records())
	if err != nil {
		return nil, nil, fmt.Errorf("list the records: %w", err)
	}
	for _, e := range entries {
		id, ifName, ok := strings.Cut(strings.TrimSuffix(e.Name(), recordSuffix), "@")
		if !ok || !strings.HasSuffix(e.Name(), recordSuffix) || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		r, err := s.load(attachment{id, ifName})
		if err != nil {
			broken = append(broken, err)
		} else if r != nil { // otherwise ended since it was listed
			records = append(records, r)
		}
	}
	return records, broken, nil
}

// save writes a record so that it is there as a whole or not at all, whenever the machine stops. The caller holds the
// NIC's lock.
func (s *store) save(r *record) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("record the attachment of container %s, interface %s: %w", r.ContainerID, r.IfName, err)
		}
	}()
	data, err := r.encode()
	if err != nil {
		return err
	}
	return statedir.Write(s.path(r.attachment()), data)
}

// remove removes an attachment's record, if there is one, and what a writer that was killed has left.
func (s *store) remove(a attachment) error {
	if err := statedir.Remove(s.path(a)); err != nil {
		return fmt.Errorf("remove the record of container %s, interface %s: %w", a.containerID, a.ifName, err)
	}
	return nil
}

// sweep removes what writers that were killed have left, once no writer can be at work on it any more.
func (s *store) sweep() error {
	tmps, err := filepath.Glob(filepath.Join(s.records(), ".*.tmp"))
	if err != nil {
		return err
	}
	for _, path := range tmps {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > abandoned {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove what was left: %w", err)
			}
		}
	}
	return nil
}

// writable says what keeps records from being written, by writing.
func (s *store) writable() error {
	f, err := os.CreateTemp(s.records(), ".writable-*.tmp")
	if err != nil {
		return err
	}
	_, err = f.WriteString("x")
	return errors.Join(err, f.Close(), os.Remove(f.Name()))
}

// bootID returns which boot of the machine this is.
func bootID() (string, error) {
	data, err := os.ReadFile(bootIDPath)
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// sinceBoot returns the seconds since the machine was booted, suspension included.
func sinceBoot() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // fails for unknown clocks only
	return now.Sec
}
