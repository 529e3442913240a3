// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/hivetest"
	"github.com/cilium/hive/job"
	"github.com/cilium/hive/script"
	"github.com/cilium/hive/script/scripttest"
	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// publicationCell is inventory, tables and publication as in the agent, without kubelet, and the commands of the
// scripts.
type publicationCell struct {
	log         *testenv.LogBuffer
	client      *fake.Clientset
	driver      *Driver
	db          *statedb.DB
	inventory   *inventory.Inventory
	devices     statedb.RWTable[*tables.DRADevice]
	allocations statedb.RWTable[*tables.DRAAllocation]
}

func TestScript(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	scripttest.Test(t, ctx, newEngine, nil, "testdata/*.txtar")
}

func newEngine(t testing.TB, _ []string) *script.Engine {
	c := &publicationCell{log: &testenv.LogBuffer{}, client: newClient()}
	log := slog.New(slog.NewTextHandler(c.log, nil))
	h := hive.New(
		statedb.Cell,
		job.Cell,
		cell.Provide(cell.NewSimpleHealth),
		cell.Module("test", "Test",
			cell.Provide(job.Registry.NewGroup, tables.NewDeviceTable, tables.NewAllocationTable, inventory.NewReportTable),
			cell.Invoke(func(db *statedb.DB, devices statedb.RWTable[*tables.DRADevice],
				allocations statedb.RWTable[*tables.DRAAllocation], reports statedb.RWTable[*inventory.Report], jobs job.Group) {
				c.db, c.devices, c.allocations = db, devices, allocations
				c.inventory = inventory.New(log, db, devices, reports, allocations)
				c.driver = New(Params{
					Logger: log, Config: Config{DriverName: testDriver, NodeName: testNode}, Client: c.client,
					Claims: fakeClaims{}, DB: db, Devices: devices, Allocations: allocations,
				})
				jobs.Add(job.OneShot("inventory", func(ctx context.Context, _ cell.Health) error { return c.inventory.Run(ctx) }))
				jobs.Add(job.OneShot("publication", func(ctx context.Context, _ cell.Health) error {
					defer c.driver.writer.stop()
					return c.driver.publisher.run(ctx)
				}))
			}),
		),
	)
	hiveLog := hivetest.Logger(t)
	cmds, err := h.ScriptCommands(hiveLog)
	require.NoError(t, err)
	t.Cleanup(func() { _ = h.Stop(hiveLog, context.Background()) })
	maps.Copy(cmds, script.DefaultCmds())
	maps.Copy(cmds, c.commands())
	return &script.Engine{Cmds: cmds, Conds: map[string]script.Cond{}, RetryInterval: 20 * time.Millisecond}
}

func (c *publicationCell) commands() map[string]script.Cmd {
	command := func(summary, args string, n int, run func(args []string) (string, error)) script.Cmd {
		return script.Command(script.CmdUsage{Summary: summary, Args: args}, func(_ *script.State, args ...string) (script.WaitFunc, error) {
			if len(args) < n {
				return nil, script.ErrUsage
			}
			out, err := run(args)
			return func(*script.State) (string, string, error) { return out, "", err }, nil
		})
	}
	return map[string]script.Cmd{
		"expect":   command("Say which managers will publish", "manager...", 0, c.expect),
		"publish":  command("Publish a manager's devices", "manager [name | n*prefix]...", 1, c.publish),
		"withdraw": command("Withdraw a manager", "manager", 1, c.withdraw),
		"pools":    command("Set the pools", "[name=none | name=all | name=ifname,...]...", 0, c.pools),
		"prepare":  command("Insert an allocation", "pool device", 2, c.prepare),
		"free":     command("Delete an allocation", "pool device", 2, c.free),
		"slices":   command("Print the slices at the apiserver", "", 0, c.slices),
		"writes":   command("Print how often the apiserver's slices were written", "", 0, c.writes),
		"logged":   command("Print how many log lines have all the parts", "part...", 1, c.logged),
	}
}

func (c *publicationCell) expect(args []string) (string, error) {
	var managers []types.DeviceManagerType
	for _, arg := range args {
		managers = append(managers, types.DeviceManagerType(arg))
	}
	c.inventory.Expect(managers...)
	return "", nil
}

func (c *publicationCell) publish(args []string) (string, error) {
	manager := types.DeviceManagerType(args[0])
	var s types.Snapshot
	for _, arg := range args[1:] {
		if count, prefix, ok := strings.Cut(arg, "*"); ok {
			n, err := strconv.Atoi(count)
			if err != nil {
				return "", err
			}
			s.Devices = append(s.Devices, inventorytest.Devices(manager, prefix, n)...)
			continue
		}
		s.Devices = append(s.Devices, &inventorytest.Device{Name: arg, Kernel: arg, Manager: manager})
	}
	c.inventory.Publish(manager, s)
	return "", nil
}

func (c *publicationCell) withdraw(args []string) (string, error) {
	c.inventory.Withdraw(types.DeviceManagerType(args[0]))
	return "", nil
}

func (c *publicationCell) pools(args []string) (string, error) {
	var configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig
	for _, arg := range args {
		name, filter, _ := strings.Cut(arg, "=")
		config := v2alpha1.CiliumNetworkDriverDevicePoolConfig{PoolName: name}
		switch filter {
		case "none":
		case "all":
			config.Filter = &v2alpha1.CiliumNetworkDriverDeviceFilter{}
		default:
			config.Filter = &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: strings.Split(filter, ",")}
		}
		configs = append(configs, config)
	}
	c.driver.SetPools(configs)
	return "", nil
}

func (c *publicationCell) prepare(args []string) (string, error) {
	txn := c.db.WriteTxn(c.allocations)
	defer txn.Abort()
	row, _, found := c.devices.Get(txn, tables.DeviceByName(args[1]))
	if !found {
		return "", fmt.Errorf("no device %s", args[1])
	}
	_, _, err := c.allocations.Insert(txn, &tables.DRAAllocation{
		Pool: args[0], DeviceName: row.Name, Manager: row.Manager, PreparedDevice: row.Dev,
	})
	txn.Commit()
	return "", err
}

func (c *publicationCell) free(args []string) (string, error) {
	txn := c.db.WriteTxn(c.allocations)
	defer txn.Abort()
	_, found, err := c.allocations.Delete(txn, &tables.DRAAllocation{Pool: args[0], DeviceName: args[1]})
	if err == nil && !found {
		err = fmt.Errorf("no allocation of %s in %s", args[1], args[0])
	}
	txn.Commit()
	return "", err
}

// slices prints one line for each slice: pool, number of slices of the pool, and the devices, or their number when
// there are many.
func (c *publicationCell) slices([]string) (string, error) {
	list, err := c.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	var lines []string
	for _, s := range list.Items {
		var names []string
		for _, d := range s.Spec.Devices {
			if got := *d.Attributes["pool"].StringValue; s.Spec.Pool.Name != testNode+"/"+got {
				return "", fmt.Errorf("device %s of pool %s has the attribute pool=%s", d.Name, s.Spec.Pool.Name, got)
			}
			names = append(names, d.Name)
		}
		devices := strings.Join(names, " ")
		if len(names) > 8 {
			devices = fmt.Sprintf("%d devices", len(names))
		}
		lines = append(lines, fmt.Sprintf("%s 1/%d: %s\n", s.Spec.Pool.Name, s.Spec.Pool.ResourceSliceCount, devices))
	}
	slices.Sort(lines)
	return strings.Join(lines, ""), nil
}

func (c *publicationCell) writes([]string) (string, error) {
	writes := 0
	for _, action := range c.client.Actions() {
		if action.GetResource().Resource == "resourceslices" && slices.Contains([]string{"create", "update", "delete"}, action.GetVerb()) {
			writes++
		}
	}
	return fmt.Sprintln(writes), nil
}

func (c *publicationCell) logged(args []string) (string, error) {
	return fmt.Sprintln(c.log.Count(args...)), nil
}
