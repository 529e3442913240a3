// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/statedir"
)

func newRecord(id string) *record {
	return &record{
		Version: recordVersion, Network: "fabric", ContainerID: id, IfName: "net1", BootID: "b", Recorded: 7, NetNS: "/run/netns/x",
		NIC: nic.Identity{Bus: "pci", Device: "0000:03:00.1", PermMAC: "02:00:00:00:00:01", MAC: "02:00:00:00:00:02", Name: "eth1", Index: 7},
		State: hostState{
			State: nic.State{
				Name: "eth1", Alias: new("port"), AltNames: []string{"enp3s0f1"}, Group: new(uint32(7)), MTU: 9000,
				MAC: "02:00:00:00:00:02", TxQLen: new(uint32(500)), Up: true, Promisc: true,
			},
			Addresses: []address{
				{Local: netip.MustParseAddr("10.1.2.5"), Peer: netip.MustParseAddr("10.1.2.4"), PrefixLen: 31, Label: "eth1:x", Valid: forever, Preferred: forever},
				{Local: netip.MustParseAddr("2001:db8::1"), PrefixLen: 64, Flags: unix.IFA_F_NODAD, Valid: 100, Preferred: 50},
			},
		},
		Routes: []recordedRoute{{From: netip.MustParseAddr("10.1.2.5"), Dst: netip.MustParsePrefix("10.1.0.0/16"), Via: netip.MustParseAddr("10.1.2.4")}},
	}
}

func newStore(t *testing.T) *store {
	t.Helper()
	s, err := openStore(filepath.Join(t.TempDir(), "state"))
	require.NoError(t, err)
	return s
}

func TestStore(t *testing.T) {
	s := newStore(t)
	want := newRecord("c1")
	none, err := s.load(want.attachment())
	require.NoError(t, err)
	require.Nil(t, none)
	require.NoError(t, s.save(want))
	got, err := s.load(want.attachment())
	require.NoError(t, err)
	require.Equal(t, want, got)

	info, err := os.Stat(s.path(want.attachment()))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	for _, dir := range []string{s.dir, s.records(), s.locks()} {
		info, err := os.Stat(dir)
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o700), info.Mode().Perm(), dir)
	}

	// An end that was put off is recorded in the same place.
	want.Refusals = 2
	require.NoError(t, s.save(want))
	require.NoError(t, s.save(newRecord("c2")))
	// A writer was killed.
	require.NoError(t, os.WriteFile(statedir.Temp(s.path(want.attachment())), []byte("{"), 0o600))
	records, broken, err := s.list()
	require.NoError(t, err)
	require.Empty(t, broken)
	require.Equal(t, []*record{want, newRecord("c2")}, records)
	require.NoError(t, s.remove(want.attachment()))
	require.NoError(t, s.remove(want.attachment()), "again")
	entries, err := os.ReadDir(s.records())
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// A record that is damaged harms only itself, and is no record.
func TestDamagedRecords(t *testing.T) {
	s := newStore(t)
	require.NoError(t, s.save(newRecord("good")))
	good, err := os.ReadFile(s.path(attachment{"good", "net1"}))
	require.NoError(t, err)
	replaced := func(old, with string) []byte {
		require.Contains(t, string(good), old)
		return []byte(strings.Replace(string(good), old, with, 1))
	}
	for name, data := range map[string][]byte{
		"empty":         {},
		"truncated":     good[:len(good)/2],
		"version":       replaced(`"version":1`, `"version":2`),
		"another":       good,
		"name":          replaced(`"state":{"name":"eth1"`, `"state":{"name":"../../x"`),
		"mac":           replaced(`"mac":"02:00:00:00:00:02","txQueueLen"`, `"mac":"x","txQueueLen"`),
		"mtu":           replaced(`"mtu":9000`, `"mtu":-1`),
		"prefix":        replaced(`"prefixLen":31`, `"prefixLen":33`),
		"peer":          replaced(`"peer":"10.1.2.4"`, `"peer":"2001:db8::2"`),
		"zone":          replaced(`"local":"2001:db8::1"`, `"local":"fe80::1%eth1"`),
		"flags":         replaced(`"flags":2`, `"flags":128`),
		"label":         replaced(`"label":"eth1:x"`, `"label":"0123456789abcdef"`),
		"containerID":   replaced(`"containerID":"good"`, `"containerID":"../x"`),
		"ifName":        replaced(`"ifName":"net1"`, `"ifName":""`),
		"no boot":       replaced(`"bootID":"b"`, `"bootID":""`),
		"no NIC":        replaced(`"name":"eth1","index":7`, `"name":"","index":7`),
		"not an object": []byte(`[]`),
	} {
		a := attachment{"bad", "net1"}
		if name != "another" && name != "containerID" {
			data = []byte(strings.Replace(string(data), `"containerID":"good"`, `"containerID":"bad"`, 1))
		}
		require.NoError(t, os.WriteFile(s.path(a), data, 0o600))
		_, err := s.load(a)
		var broken *brokenError
		require.ErrorAs(t, err, &broken, name)
		records, others, err := s.list()
		require.NoError(t, err)
		require.Equal(t, []*record{newRecord("good")}, records, name)
		require.Len(t, others, 1, name)
	}
}

// What others have put into the directory leads to no other file, and blocks nothing.
func TestStoreOfStrangeFiles(t *testing.T) {
	s := newStore(t)
	r := newRecord("c1")
	precious := filepath.Join(t.TempDir(), "precious")
	require.NoError(t, os.WriteFile(precious, []byte("kept"), 0o600))
	require.NoError(t, os.Symlink(precious, statedir.Temp(s.path(r.attachment()))))
	require.ErrorIs(t, s.save(r), unix.ELOOP)
	require.NoError(t, s.save(r), "the link has been removed")
	data, err := os.ReadFile(precious)
	require.NoError(t, err)
	require.Equal(t, "kept", string(data))

	elsewhere := filepath.Join(t.TempDir(), "record")
	require.NoError(t, os.Rename(s.path(r.attachment()), elsewhere))
	require.NoError(t, os.Symlink(elsewhere, s.path(r.attachment())))
	require.NoError(t, unix.Mkfifo(s.path(attachment{"c2", "net1"}), 0o600))
	records, broken, err := s.list()
	require.NoError(t, err)
	require.Empty(t, records)
	require.Len(t, broken, 2)
	for _, err := range broken {
		require.ErrorAs(t, err, new(*brokenError))
	}
	require.NoError(t, os.Symlink(precious, filepath.Join(s.locks(), "k.lock")))
	_, err = s.lock(t.Context(), "k")
	require.ErrorIs(t, err, unix.ELOOP)

	require.NoError(t, os.Chmod(s.records(), 0o777))
	_, err = openStore(s.dir)
	require.ErrorContains(t, err, "that nobody else may write to")
	require.NoError(t, os.Chmod(s.records(), 0o700))
	require.NoError(t, os.Rename(s.locks(), s.locks()+"2"))
	require.NoError(t, os.Symlink(s.locks()+"2", s.locks()))
	_, err = openStore(s.dir)
	require.ErrorContains(t, err, "needed is a directory")
}

// Nothing is left of a record that cannot be written as a whole.
func TestStoreWithoutSpace(t *testing.T) {
	testenv.Privileged(t)
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	defer func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	s, err := openStore(filepath.Join(dir, "state"))
	require.NoError(t, err)
	require.NoError(t, s.save(newRecord("c1")))
	filler, err := os.Create(filepath.Join(dir, "filler"))
	require.NoError(t, err)
	_, err = filler.Write(make([]byte, 1<<20))
	require.ErrorIs(t, err, unix.ENOSPC)
	require.NoError(t, filler.Close())

	big := newRecord("c1")
	for i := range 200 {
		big.State.Addresses = append(big.State.Addresses, address{Local: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), PrefixLen: 32})
	}
	require.ErrorIs(t, s.save(big), unix.ENOSPC)
	got, err := s.load(big.attachment())
	require.NoError(t, err)
	require.Equal(t, newRecord("c1"), got, "the old one")
	require.ErrorIs(t, s.save(newRecord("c2")), unix.ENOSPC)
	records, broken, err := s.list()
	require.NoError(t, err)
	require.Empty(t, broken)
	require.Len(t, records, 1)
	require.ErrorIs(t, s.writable(), unix.ENOSPC)
}

// Writers of different attachments do not disturb each other.
func TestStoreConcurrency(t *testing.T) {
	s := newStore(t)
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			r := newRecord(fmt.Sprint("c", i))
			for range 5 {
				if err := errors.Join(s.save(r), s.remove(r.attachment()), s.save(r)); err != nil {
					t.Error(err)
				}
				if _, broken, err := s.list(); len(broken) > 0 || err != nil {
					t.Error(broken, err)
				}
			}
		})
	}
	wg.Wait()
	records, _, err := s.list()
	require.NoError(t, err)
	require.Len(t, records, 32)
}

func TestSweep(t *testing.T) {
	s := newStore(t)
	old, fresh := statedir.Temp(s.path(attachment{"old", "net1"})), statedir.Temp(s.path(attachment{"fresh", "net1"}))
	for _, path := range []string{old, fresh} {
		require.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	then := time.Now().Add(-2 * abandoned)
	require.NoError(t, os.Chtimes(old, then, then))
	require.NoError(t, s.save(newRecord("c1")))
	require.NoError(t, os.Chtimes(s.path(attachment{"c1", "net1"}), then, then))
	require.NoError(t, s.sweep())
	require.NoFileExists(t, old)
	require.FileExists(t, fresh)
	require.FileExists(t, s.path(attachment{"c1", "net1"}))
}

func TestLock(t *testing.T) {
	s := newStore(t)
	first, err := s.lock(t.Context(), "pci-0000:03:00.1")
	require.NoError(t, err)
	other, err := s.lock(t.Context(), "pci-0000:03:00.2")
	require.NoError(t, err, "another NIC does not wait")
	require.NoError(t, other.Close())

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.lock(ctx, "pci-0000:03:00.1")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, int(types.ErrTryAgainLater), int(asCNI(err).(*types.Error).Code))

	// A process that inherited the file holds the lock after its parent has closed it.
	inherited, err := unix.FcntlInt(first.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, first.Close())
	got := make(chan error, 1)
	go func() {
		f, err := s.lock(t.Context(), "pci-0000:03:00.1")
		if err == nil {
			err = f.Close()
		}
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatalf("the lock was free: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, unix.Close(inherited))
	require.NoError(t, <-got)
	require.NoError(t, func() error { f, err := s.lock(t.Context(), "../x/y"); _ = f.Close(); return err }())
	require.NoFileExists(t, filepath.Join(s.dir, "x"))
}

// requireRecordSound checks what holds for whatever is in a record's file.
func requireRecordSound(t *testing.T, data []byte) {
	t.Helper()
	r, err := decodeRecord(data)
	if err != nil {
		return
	}
	require.NotContains(t, r.attachment().file(), "/")
	for _, a := range r.State.Addresses {
		if out, alive := a.toKernel(r.elapsed(100)); alive {
			back, ok := addressOf(out)
			require.True(t, ok)
			require.Equal(t, a.Local, back.Local)
			require.Equal(t, a.PrefixLen, back.PrefixLen)
		}
		prefix, _ := a.inPod()
		require.True(t, prefix.IsValid(), "%+v", a)
	}
	require.Len(t, inOrderOfAdding(r.State.Addresses), len(r.State.Addresses))
	_ = staticConfig(r.State.Addresses, nil)
	// What is read is written and read again.
	text, err := json.Marshal(r)
	require.NoError(t, err)
	same, err := decodeRecord(text)
	require.NoError(t, err)
	again, err := json.Marshal(same)
	require.NoError(t, err)
	require.Equal(t, string(text), string(again))
}

func recordSeeds() [][]byte {
	seed, err := json.Marshal(newRecord("c1"))
	if err != nil {
		panic(err) // it is a constant
	}
	return [][]byte{
		seed, seed[:len(seed)/2],
		[]byte(`{"version": 1, "containerID": "c", "ifName": "n", "bootID": "b", "nic": {"name": "x"}, "state": {"name": "x", "addresses": [{}]}}`),
	}
}

func FuzzDecodeRecord(f *testing.F) {
	for _, seed := range recordSeeds() {
		f.Add(seed)
	}
	f.Fuzz(requireRecordSound)
}

// A run without the fuzzing engine, which anyone can repeat: the inputs are the same each time.
func TestRecordsOfAnyContent(t *testing.T) { mutate(t, recordSeeds(), requireRecordSound) }

// mutate calls a check with changed seeds: bytes changed, removed, repeated, and put in from other seeds.
func mutate(t *testing.T, seeds [][]byte, check func(*testing.T, []byte)) {
	t.Helper()
	const rounds = 20000
	source := rand.New(rand.NewPCG(1, 2))
	const alphabet = `{}[]",:-+.eE0123456789/%\\abcdefntrul` + "\x00\xff"
	for range rounds {
		data := slices.Clone(seeds[source.IntN(len(seeds))])
		for range 1 + source.IntN(4) {
			at := source.IntN(len(data) + 1)
			end := min(len(data), at+source.IntN(16))
			switch source.IntN(4) {
			case 0:
				data = slices.Delete(data, at, end)
			case 1:
				data = slices.Insert(data, at, alphabet[source.IntN(len(alphabet))])
			case 2:
				data = slices.Insert(data, at, slices.Clone(data[at:end])...)
			case 3:
				other := seeds[source.IntN(len(seeds))]
				from := source.IntN(len(other))
				data = slices.Insert(data, at, other[from:min(len(other), from+source.IntN(64))]...)
			}
		}
		check(t, data)
	}
}
