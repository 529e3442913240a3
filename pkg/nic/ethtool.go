// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// The structures are those of linux/ethtool.h: numbers of 32 bits in the machine's order, the first of which is the request.

// request is an ethtool request's structure.
type request []byte

// newRequest makes one of so many bytes.
func newRequest(command uint32, size int) request {
	r := make(request, size)
	r.put(0, command)
	return r
}

func (r request) put(offset int, number uint32) { binary.NativeEndian.PutUint32(r[offset:], number) }
func (r request) get(offset int) uint32         { return binary.NativeEndian.Uint32(r[offset:]) }

// words is a setting whose structure is so many numbers after the request, some of which can be set.
func words(name string, get, set uint32, count int, settable ...int) setting {
	ask := func(d driver) (request, error) {
		r := newRequest(get, 4+4*count)
		return r, d(r)
	}
	return setting{
		name: name,
		read: func(d driver) ([]uint32, error) {
			r, err := ask(d)
			if err != nil {
				return nil, err
			}
			numbers := make([]uint32, len(settable))
			for i, word := range settable {
				numbers[i] = r.get(4 + 4*word)
			}
			return numbers, nil
		},
		write: func(d driver, want, _ []uint32) error {
			if len(want) != len(settable) {
				return fmt.Errorf("%d numbers were noted, and it has %d", len(want), len(settable))
			}
			r, err := ask(d)
			if err != nil {
				return err
			}
			r.put(0, set)
			for i, word := range settable {
				r.put(4+4*word, want[i])
			}
			return d(r)
		},
	}
}

// channels are the numbers of queues. The kernel refuses fewer of them than the table of receive queues leads to; a table
// that a pod has made goes then.
var channels = func() setting {
	k := words("channels", unix.ETHTOOL_GCHANNELS, unix.ETHTOOL_SCHANNELS, 8, 4, 5, 6, 7)
	write := k.write
	k.write = func(d driver, want, now []uint32) error {
		err := write(d, want, now)
		if err == nil {
			return nil
		}
		if resetErr := resetTable(d); resetErr != nil {
			return err
		}
		return write(d, want, now)
	}
	return k
}()

// coalescing is when the NIC interrupts. Where the driver adapts the delay and the number of frames to the traffic, they
// are what they were last, and nobody has set them.
var coalescing = func() setting {
	const adaptiveRx, adaptiveTx = 9, 10
	all := make([]int, 22)
	for i := range all {
		all[i] = i
	}
	k := words("coalescing", unix.ETHTOOL_GCOALESCE, unix.ETHTOOL_SCOALESCE, len(all), all...)
	k.live = func(want, now []uint32) []uint32 {
		if want[adaptiveRx] != 0 {
			copy(want[0:4], now[0:4])
		}
		if want[adaptiveTx] != 0 {
			copy(want[4:8], now[4:8])
		}
		return want
	}
	return k
}()

// flowControl is pause frames. Where it is negotiated, some drivers tell what came of that.
var flowControl = func() setting {
	k := words("flow control", unix.ETHTOOL_GPAUSEPARAM, unix.ETHTOOL_SPAUSEPARAM, 3, 0, 1, 2)
	k.live = func(want, now []uint32) []uint32 {
		if want[0] != 0 {
			copy(want[1:], now[1:])
		}
		return want
	}
	return k
}()

const (
	// Offsets and size of struct ethtool_rxnfc.
	rxnfcFlowType = 4
	rxnfcData     = 8
	rxnfcLocation = 176
	rxnfcCount    = 184
	rxnfcRules    = 188
	rxnfcSize     = 192
)

// flowRules are the locations of rules that drop frames or lead them to a queue (ntuple). What the pod has added is deleted;
// what it has deleted of the host's cannot be made again, and one that it has put in the place of a host's is not
// told from that.
var flowRules = setting{
	name: "flow rules", essential: true,
	read: func(d driver) ([]uint32, error) {
		count := newRequest(unix.ETHTOOL_GRXCLSRLCNT, rxnfcSize)
		if err := d(count); err != nil {
			return nil, err
		}
		n := count.get(rxnfcCount)
		if n == 0 {
			return []uint32{}, nil
		}
		if n > 1<<20 {
			return nil, fmt.Errorf("the driver tells of %d", n)
		}
		all := newRequest(unix.ETHTOOL_GRXCLSRLALL, rxnfcSize+4*int(n))
		all.put(rxnfcCount, n)
		if err := d(all); err != nil {
			return nil, err
		}
		rules := make([]uint32, min(n, all.get(rxnfcCount)))
		for i := range rules {
			rules[i] = all.get(rxnfcRules + 4*i)
		}
		slices.Sort(rules)
		return rules, nil
	},
	write: func(d driver, want, now []uint32) error {
		var errs []error
		for _, location := range now {
			if slices.Contains(want, location) {
				continue
			}
			r := newRequest(unix.ETHTOOL_SRXCLSRLDEL, rxnfcSize)
			r.put(rxnfcLocation, location)
			if err := d(r); err != nil {
				errs = append(errs, fmt.Errorf("delete rule %d, which a pod has left: %w", location, err))
			}
		}
		for _, location := range want {
			if !slices.Contains(now, location) {
				errs = append(errs, fmt.Errorf("rule %d, which the host had, is gone; add it again with ethtool --config-ntuple", location))
			}
		}
		return errors.Join(errs...)
	},
}

const (
	// Offsets of struct ethtool_rxfh, which the table and the key follow.
	rxfhTableSize = 8
	rxfhKeySize   = 12
	rxfhFunction  = 16
	rxfhTransform = 17
	rxfhTable     = 24
	// tableUnchanged is ETH_RXFH_INDIR_NO_CHANGE.
	tableUnchanged = 0xffffffff
	// hashingHead is how many numbers precede the key and the table in the setting.
	hashingHead = 4
)

// hashing is how receive queues are chosen: function, transformation of its input, size of the key, size of the table, the
// key's bytes, and the table.
var hashing = setting{
	name: "receive hashing", read: readHashing, write: writeHashing,
}

func readHashing(d driver) ([]uint32, error) {
	sizes := newRequest(unix.ETHTOOL_GRSSH, rxfhTable)
	if err := d(sizes); err != nil {
		return nil, err
	}
	table, key := sizes.get(rxfhTableSize), sizes.get(rxfhKeySize)
	if table > 1<<20 || key > 1<<20 {
		return nil, fmt.Errorf("the driver tells of a table of %d and a key of %d", table, key)
	}
	r := newRequest(unix.ETHTOOL_GRSSH, rxfhTable+4*int(table)+int(key))
	r.put(rxfhTableSize, table)
	r.put(rxfhKeySize, key)
	if err := d(r); err != nil {
		return nil, err
	}
	numbers := []uint32{uint32(r[rxfhFunction]), uint32(r[rxfhTransform]), key, table}
	for _, b := range r[rxfhTable+4*int(table):] {
		numbers = append(numbers, uint32(b))
	}
	for i := range int(table) {
		numbers = append(numbers, r.get(rxfhTable+4*i))
	}
	return numbers, nil
}

func writeHashing(d driver, want, now []uint32) error {
	w, wantOK := parseHash(want)
	n, nowOK := parseHash(now)
	if !wantOK || !nowOK || len(w.key) != len(n.key) || len(w.table) != len(n.table) {
		return errors.New("the sizes of key and table are not what they were")
	}
	if !slices.Equal(w.table, n.table) && w.isSpread() {
		// A table that is not the driver's own would keep the number of queues from being changed.
		if err := resetTable(d); err == nil {
			if now, err = readHashing(d); err != nil {
				return err
			}
			n, _ = parseHash(now)
		}
	}
	// A driver that cannot set one of them refuses a request that has it, were it the same.
	table, key := w.table, w.key
	size := uint32(len(table))
	if slices.Equal(table, n.table) {
		table, size = nil, tableUnchanged
	}
	if slices.Equal(key, n.key) {
		key = nil
	}
	function := w.function
	if function == n.function {
		function = 0 // no change
	}
	if size == tableUnchanged && len(key) == 0 && function == 0 && w.transform == n.transform {
		return nil
	}
	r := newRequest(unix.ETHTOOL_SRSSH, rxfhTable+4*len(table)+len(key))
	r.put(rxfhTableSize, size)
	r.put(rxfhKeySize, uint32(len(key)))
	r[rxfhFunction], r[rxfhTransform] = byte(function), byte(w.transform)
	for i, queue := range table {
		r.put(rxfhTable+4*i, queue)
	}
	for i, b := range key {
		r[rxfhTable+4*len(table)+i] = byte(b)
	}
	return d(r)
}

// hash is the setting of [hashing].
type hash struct {
	function, transform uint32
	key, table          []uint32
}

func parseHash(numbers []uint32) (h hash, ok bool) {
	if len(numbers) < hashingHead {
		return h, false
	}
	key, table := uint64(numbers[2]), uint64(numbers[3])
	if uint64(len(numbers)) != hashingHead+key+table {
		return h, false
	}
	rest := numbers[hashingHead:]
	return hash{function: numbers[0], transform: numbers[1], key: rest[:key], table: rest[key:]}, true
}

// isSpread says whether the table leads to all queues in turn, as drivers make it.
func (h hash) isSpread() bool {
	if len(h.table) == 0 {
		return false
	}
	queues := slices.Max(h.table) + 1
	for i, queue := range h.table {
		if queues == 0 || queue != uint32(i)%queues {
			return false
		}
	}
	return true
}

// resetTable has the driver make the table of receive queues as it likes.
func resetTable(d driver) error { return d(newRequest(unix.ETHTOOL_SRSSH, rxfhTable)) }

// hashedFlows are the kinds of flows (TCP_V4_FLOW and so on) that have a choice of fields to be hashed.
const hashedFlows = 18

// noFields stands for a kind of flow that the driver does not have.
const noFields = 0xffffffff

// hashFields are which fields of a frame are hashed, two numbers for each kind of flow.
var hashFields = setting{
	name: "hashed fields",
	read: func(d driver) ([]uint32, error) {
		numbers := make([]uint32, 0, 2*hashedFlows)
		some := false
		for kind := range hashedFlows {
			r := newRequest(unix.ETHTOOL_GRXFH, rxnfcSize)
			r.put(rxnfcFlowType, uint32(kind+1))
			switch err := d(r); {
			case err == nil:
				some = true
				numbers = append(numbers, r.get(rxnfcData), r.get(rxnfcData+4))
			case errors.Is(err, unix.EOPNOTSUPP) && kind == 0:
				return nil, err // not even of TCP: the driver has none
			case isUnsupported(err):
				numbers = append(numbers, noFields, noFields)
			default:
				return nil, err
			}
		}
		if !some {
			return nil, unix.EOPNOTSUPP
		}
		return numbers, nil
	},
	write: func(d driver, want, now []uint32) error {
		if len(want) != len(now) {
			return fmt.Errorf("%d numbers were noted, and it has %d", len(want), len(now))
		}
		var errs []error
		for i := 0; i+1 < len(want); i += 2 {
			if want[i] == now[i] && want[i+1] == now[i+1] || want[i] == noFields {
				continue
			}
			r := newRequest(unix.ETHTOOL_SRXFH, rxnfcSize)
			r.put(rxnfcFlowType, uint32(i/2+1))
			r.put(rxnfcData, want[i])
			r.put(rxnfcData+4, want[i+1])
			errs = append(errs, d(r))
		}
		return errors.Join(errs...)
	},
}

const (
	// featureBlocks is more than any kernel has blocks of 32 features.
	featureBlocks = 16
	featureHead   = 8
)

// features are the offloads: for each block of 32 which can be changed, and which are wanted, whether or not the driver does
// them just now.
var features = setting{
	name: "features",
	read: func(d driver) ([]uint32, error) {
		const block = 16
		r := newRequest(unix.ETHTOOL_GFEATURES, featureHead+block*featureBlocks)
		r.put(4, featureBlocks)
		if err := d(r); err != nil {
			return nil, err
		}
		var numbers []uint32
		for i := range int(min(r.get(4), featureBlocks)) {
			available, requested := r.get(featureHead+block*i), r.get(featureHead+block*i+4)
			numbers = append(numbers, available, requested&available)
		}
		return numbers, nil
	},
	write: func(d driver, want, now []uint32) error {
		if len(want) != len(now) {
			return fmt.Errorf("%d numbers were noted, and it has %d", len(want), len(now))
		}
		r := newRequest(unix.ETHTOOL_SFEATURES, featureHead+4*len(want))
		r.put(4, uint32(len(want)/2))
		for i := 0; i+1 < len(want); i += 2 {
			r.put(featureHead+4*i, want[i+1]^now[i+1])
			r.put(featureHead+4*i+4, want[i+1])
		}
		return d(r)
	},
	live: func(want, now []uint32) []uint32 {
		for i := 0; i+1 < len(want); i += 2 {
			both := want[i] & now[i]
			want[i], want[i+1] = now[i], want[i+1]&both|now[i+1]&^both
		}
		return want
	},
}
