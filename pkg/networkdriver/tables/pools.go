// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package tables

import (
	"slices"
	"strconv"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
)

// PoolTableName is the name of the table of pools.
const PoolTableName = "networkdriver-pools"

// Pool is a row of the table of pools: what the node offers in one.
type Pool struct {
	// Name is the configured name, without the node.
	Name string
	// Devices are the names of the devices that are offered, sorted, and Free those of them that are not prepared.
	Devices []string
	Free    []string
}

// Equal says whether the rows say the same.
func (p *Pool) Equal(other *Pool) bool {
	return p.Name == other.Name && slices.Equal(p.Devices, other.Devices) && slices.Equal(p.Free, other.Free)
}

// TableHeader implements [statedb.TableWritable].
func (p *Pool) TableHeader() []string { return []string{"Name", "Devices", "Free"} }

// TableRow implements [statedb.TableWritable].
func (p *Pool) TableRow() []string {
	return []string{p.Name, strconv.Itoa(len(p.Devices)), strconv.Itoa(len(p.Free))}
}

var poolNameIndex = statedb.Index[*Pool, string]{
	Name:       "name",
	FromObject: func(p *Pool) index.KeySet { return index.NewKeySet(index.String(p.Name)) },
	FromKey:    index.String,
	FromString: index.FromString,
	Unique:     true,
}

// PoolByName queries by the pool's name.
var PoolByName = poolNameIndex.Query

// NewPoolTable registers the table of pools.
func NewPoolTable(db *statedb.DB) (statedb.RWTable[*Pool], error) {
	return statedb.NewTable(db, PoolTableName, poolNameIndex)
}
